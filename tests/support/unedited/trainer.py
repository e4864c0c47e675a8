"""An HF Trainer: `trainer.py OUT`."""

import sys

import numpy as np
import transformers

from tests.support.hf_training import make_model, rows

kept = {}


class Keeping(transformers.Trainer):
    """Keeps the gradients before they are clipped."""

    def _clip_grad_norm(self, model):
        step = self.state.global_step + 1
        kept.update({f"{step}/{name}": p.grad.numpy().copy() for name, p in model.named_parameters()})
        return super()._clip_grad_norm(model)


args = transformers.TrainingArguments(
    output_dir=sys.argv[1] + ".out",
    use_cpu=True,
    per_device_train_batch_size=2,
    max_grad_norm=0.05,
    max_steps=3,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    dataloader_pin_memory=False,
)
Keeping(model=make_model(), args=args, train_dataset=rows(8)).train()
np.savez(sys.argv[1], **kept)
