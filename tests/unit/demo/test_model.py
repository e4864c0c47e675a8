from __future__ import annotations

import torch

from gradtap.demo.data import batch
from gradtap.demo.model import ByteTransformer


def test_the_model_has_about_three_million_trainable_parameters() -> None:
    """Between 2.5 and 3.5 million, the tied matrix counted once."""
    trainable = sum(p.numel() for p in ByteTransformer(0).parameters() if p.requires_grad)
    assert 2_500_000 <= trainable <= 3_500_000


def test_the_embedding_and_the_head_are_one_parameter() -> None:
    """Tied by identity, and listed once under the embedding's name."""
    model = ByteTransformer(0)
    assert model.head.weight is model.tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tokens.weight" in names
    assert "head.weight" not in names


def test_one_layer_is_frozen_and_all_others_get_a_gradient() -> None:
    """Only the positions ask for none; every other parameter gets a gradient that is not zero."""
    model = ByteTransformer(0)
    model(torch.from_numpy(batch(1, 0, 0, 0))).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == {"positions.weight"}


def test_a_seed_fixes_the_model_and_leaves_the_callers_generator_alone() -> None:
    """Equal weights for equal seeds, others for another, and the global generator does not move."""
    state = torch.random.get_rng_state()
    one, same, other = (ByteTransformer(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["tokens.weight"], other["tokens.weight"])


def test_a_byte_is_predicted_from_earlier_bytes_only() -> None:
    """Changing the last given byte changes no logits before it."""
    model = ByteTransformer(0).eval()
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    one = torch.from_numpy(batch(1, 0, 0, 0))
    two = one.clone()
    two[:, -2] = (two[:, -2] + 1) % 256
    model(one)
    model(two)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])
