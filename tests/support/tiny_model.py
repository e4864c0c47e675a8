"""A model of odd sizes that holds every kind of parameter gradtap must get right, and its data."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 13, 7, 5


class TinyModel(nn.Module):
    """Embedding tied to the head, a convolution (4-d), a frozen layer, a scale of one element, a side branch.

    Odd sizes, so that partitions cut parameters inside rows. The side branch runs only where `side` is true, so its
    parameters have no gradient in some windows. `scalar` makes the scale 0-d, which sharded engines refuse.
    A child is called `module` by choice: it is no wrapper. Smooth throughout: a kink would turn the rounding of half
    precision into error.
    """

    def __init__(self, *, scalar: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(1, 3, (3, 2), padding=(1, 1))
        self.module = nn.Linear(3 * (WIDTH + 1), 11)
        self.side = nn.Linear(WIDTH, 11, bias=False)
        self.out = nn.Linear(11, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5) if scalar else torch.tensor([1.5]))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, side: bool = True) -> torch.Tensor:
        """Mean cross-entropy of predicting each token from itself and its neighbours; `tokens` is (batch, LENGTH)."""
        x = self.embed(tokens)
        x = x + self.frozen(x)
        y = torch.tanh(self.conv(x.unsqueeze(1)))
        y = y.permute(0, 2, 1, 3).reshape(tokens.shape[0], LENGTH, -1)
        y = self.module(y)
        if side:
            y = y + self.side(x)
        logits = self.head(torch.tanh(self.out(torch.tanh(y)))) * self.scale
        return nn.functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), tokens.roll(1, 1).reshape(-1))


def batch(step: int, micro: int, rank: int, size: int = 4) -> torch.Tensor:
    """Tokens of one micro-batch of one rank; the same for the same numbers, whoever asks."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1_009 * micro + rank)
    return torch.randint(VOCABULARY, (size, LENGTH), generator=generator)


def uses_side(step: int, micro: int, rule: str) -> bool:
    """Whether the side branch runs: `always`, `even` (steps only), or `late` (not in a window's first micro-batch)."""
    return rule == "always" or (rule == "even" and step % 2 == 0) or (rule == "late" and micro > 0)


def reference(
    model: TinyModel, step: int, micros: int, world: int, rule: str = "always", divisor: int | None = None
) -> dict[str, torch.Tensor]:
    """The mean gradient of a window over all ranks, by one process in float64; parameters without one are left out."""
    double = TinyModel(scalar=model.scale.dim() == 0).double()
    double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    for micro in range(micros):
        for rank in range(world):
            loss = double(batch(step, micro, rank), side=uses_side(step, micro, rule))
            (loss / ((divisor or micros) * world)).backward()
    return {name: param.grad for name, param in double.named_parameters() if param.grad is not None}
