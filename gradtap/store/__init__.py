"""How a run lies on disk, and everything that writes there.

Lower half, each on its own: `files` (atomic writes), `shard` (append-in-place Zarr shards), `journal` (commit
records of a rank), `lock` (one live job for a run), `runfile` (`run.json`), `schedule_log` (which steps are
captured), `metadata` (Zarr documents) and `rows` (ledger and summary arrays). The session and the recorder build
on them. Nothing in this package imports a deep learning framework.
"""

from __future__ import annotations
