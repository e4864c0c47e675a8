"""Capture: from an engine at its step boundary to local gradient pieces in host memory, plus the facts of the step.

In: what `attach` was given (an Accelerator after prepare, a DeepSpeed engine, a model with its optimizer).
Out: `LocalGrad`, `StagedPiece`, `StepFacts`, `StepOutcome` of `gradtap.types`.
This package alone may import torch, accelerate or deepspeed; it must know nothing of zarr, of files or of HTTP, and it
never calls a collective.
"""

from __future__ import annotations
