"""The audit: faults of a training loop, seen in the scale ledger alone. No gradient is read.

`windows` looks at accumulation, `scales` at loss scales and skipped steps, `counters` at step numbers and learning
rates; `parameters` names the parameters that are behind a finding; `missing` has what this ledger cannot tell.
"""

from __future__ import annotations

from gradtap.query.audit.finding import Finding
from gradtap.query.audit.report import audit, findings

__all__ = ["Finding", "audit", "findings"]
