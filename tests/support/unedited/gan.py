"""Two models and two optimizers of one Accelerator, each clipped: `gan.py OUT`."""

import sys

import numpy as np
import torch
from accelerate import Accelerator


class Generator(torch.nn.Linear):
    """Makes."""


class Discriminator(torch.nn.Linear):
    """Judges."""


torch.manual_seed(0)
made, judge = Generator(3, 4), Discriminator(4, 1)
makes, judges = torch.optim.Adam(made.parameters(), lr=0.1), torch.optim.Adam(judge.parameters(), lr=0.1)
accelerator = Accelerator(cpu=True)
made, judge, makes, judges = accelerator.prepare(made, judge, makes, judges)
kept = {}
for step in (1, 2, 3):
    noise = torch.randn(5, 3)
    judges.zero_grad()
    accelerator.backward((judge(made(noise).detach()) - 1).square().mean())
    kept |= {f"Discriminator/{step}/{name}": p.grad.numpy().copy() for name, p in judge.named_parameters()}
    accelerator.clip_grad_norm_(judge.parameters(), 0.01)
    judges.step()
    makes.zero_grad()
    accelerator.backward(judge(made(noise)).square().mean())
    kept |= {f"Generator/{step}/{name}": p.grad.numpy().copy() for name, p in made.named_parameters()}
    accelerator.clip_grad_norm_(made.parameters(), 0.01)
    makes.step()
np.savez(sys.argv[1], **kept)
sys.stdout.write("trained\n")
