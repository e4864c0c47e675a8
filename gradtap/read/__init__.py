"""read: from a folder to gradients, steps, norms and the ledger.

In: a run's folder, live, closed or left unclosed by a killed job. Out: `GradSlice`, `Norms`, `Ledger`, `RunInfo` and
`VerifyReport`. Every chunk is compared with the checksum that its writer's journal holds, so that what comes out is
what was committed, or an error that names the file.

Must not be known here: torch, an engine, HTTP, and how anything is written.
"""

from __future__ import annotations

from gradtap.read.attempts import Attempt
from gradtap.read.info import RunInfo
from gradtap.read.ledger import Ledger
from gradtap.read.norms import Norms
from gradtap.read.run import Run, open_run
from gradtap.read.session import SessionView
from gradtap.read.verify import Damage, VerifyReport, verify

open = open_run
"""The name under which users know it: `gradtap.open`."""

__all__ = [
    "Attempt",
    "Damage",
    "Ledger",
    "Norms",
    "Run",
    "RunInfo",
    "SessionView",
    "VerifyReport",
    "open",
    "open_run",
    "verify",
]
