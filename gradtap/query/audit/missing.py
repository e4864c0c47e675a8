"""What the ledger as it is cannot tell: which faults, and the fact that would have to be recorded for them."""

from __future__ import annotations

NOT_JUDGED = {
    "rank-disagreement": "a checksum of the replicated gradients of each rank, field `replica_crc`",
    "counter-drift": "the trainer's own step count, field `loop_step`; only jumps of the engine's count are looked for",
    "scheduler-drift": "scheduler steps in each window, field `scheduler_steps`; only a rate that moved over a skipped "
    "step is looked for",
    "lost-micro-batches": "backwards that ran with the boundary flag on, field `boundaries`; only more backwards than "
    "the engine accumulates are looked for",
    "halved-on-scale-growth": "the loss scale that the engine divided by, field `scale_used`; the last step of a "
    "session cannot be judged without it",
}
"""Code -> what is missing. Silence about these is no proof."""
