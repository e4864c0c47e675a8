"""A Lightning Trainer: `fit.py OUT`."""

import sys
import warnings

import numpy as np
import pytorch_lightning as pl
import torch

from tests.support.tiny_model import TinyModel, batch

warnings.filterwarnings("ignore", module="pytorch_lightning")
kept = {}


class Module(pl.LightningModule):
    """The tiny model."""

    def __init__(self):
        super().__init__()
        self.tiny = TinyModel()

    def configure_optimizers(self):
        """SGD."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def training_step(self, tokens, index):
        """The loss."""
        return self.tiny(tokens)

    def on_before_optimizer_step(self, optimizer):
        """Keep the gradients before they are clipped."""
        named = [(name, param) for name, param in self.named_parameters() if param.requires_grad]
        kept.update({f"{self.trainer.global_step + 1}/{name}": p.grad.numpy().copy() for name, p in named})


trainer = pl.Trainer(
    accelerator="cpu",
    max_epochs=1,
    gradient_clip_val=0.05,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = torch.cat([batch(1, micro, 0) for micro in range(3)])
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
np.savez(sys.argv[1], **kept)
