"""The run that users open: all that reading knows of it, and the queries that need more than reading."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gradtap.read.place import folder_of
from gradtap.read.run import Run as ReadRun

if TYPE_CHECKING:
    from gradtap.query.answer import Answer
    from gradtap.query.audit import Finding


def open(path: str | os.PathLike[str]) -> Run:
    """Open a run for reading: the folder that was given to `gradtap.attach`. As `gradtap.read.open_run`, which see."""
    return Run(folder_of(path))


class Run(ReadRun):
    """One run, as of now, with every query as a method."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Faults of the training loop that the ledger shows; see `gradtap.query.audit`. Reads no gradient."""
        from gradtap.query.audit import findings

        return findings(self)

    def audit(self) -> Answer:
        """The findings as the command line and the service give them, and which faults could not be looked for."""
        from gradtap.query.audit import audit

        return audit(self)
