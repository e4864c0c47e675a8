"""The demo's model: a byte-level transformer of about 3 M parameters, with a tied embedding and a frozen layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtap.demo.data import CONTEXT

VOCABULARY = 256
WIDTH = 256
HEADS = 4
DEPTH = 4


class Attention(nn.Module):
    """Causal self-attention over [batch, time, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in: [batch, time, WIDTH]."""
        heads = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in: [batch, time, WIDTH]."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class ByteTransformer(nn.Module):
    """Predicts the next byte. `positions` is frozen; `head.weight` is `tokens.weight`. The same for the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.positions = nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        with torch.no_grad():
            self.tokens.weight.mul_(WIDTH**-0.5)
            self.positions.weight.copy_(_waves() * WIDTH**-0.5)
        self.positions.requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        """Mean cross entropy in nats, a scalar, of int64 [batch, CONTEXT + 1]."""
        given, wanted = batch[:, :-1], batch[:, 1:]
        x = self.tokens(given) + self.positions.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def _waves() -> Tensor:
    rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10_000.0) / WIDTH))
    angles = torch.arange(CONTEXT)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
