"""Makes of a store one that an older or a newer version would have written: arrays less, arrays more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

GROUP = Path("sessions/0000/gradients.zarr")


def drop_array(run: Path, kind: str, name: str) -> None:
    """The writer did not know this ledger field or statistic: neither merged nor of any rank."""
    group = run / GROUP
    for folder in (group / f"_{kind}" / name, *group.glob(f"_{kind}/r*/{name}")):
        shutil.rmtree(folder)
    _consolidated(group, lambda nodes: nodes.pop(f"_{kind}/{name}"))


def add_array(run: Path, kind: str, like: str, name: str) -> None:
    """The writer knew one more ledger field or statistic, which looks like another one."""
    group = run / GROUP
    for folder in (group / f"_{kind}" / like, *group.glob(f"_{kind}/r*/{like}")):
        shutil.copytree(folder, folder.parent / name)
    _consolidated(group, lambda nodes: nodes.update({f"_{kind}/{name}": nodes[f"_{kind}/{like}"]}))


def _consolidated(group: Path, change: Any) -> None:
    document = json.loads((group / "zarr.json").read_text())
    change(document["consolidated_metadata"]["metadata"])
    (group / "zarr.json").write_text(json.dumps(document))
