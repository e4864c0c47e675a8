"""What each Python process under `gradtap run` starts with: waits for a training framework to be imported.

Not part of the package: the interpreter finds it through PYTHONPATH, imports it before the program, and after it the
user's own `sitecustomize`, which it stands before. Light: most processes (compilers, data loaders, launchers) never
train, so nothing but what starting Python loads anyway is imported here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_WATCHED = {
    "accelerate.accelerator",
    "transformers.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
}


class _Loader:
    """The module's own loader, and then gradtap's hook."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        """As the module's own."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run the module, then tell gradtap of it."""
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _loaded(module)


class _Finder:
    """First on the import path: looks out for four modules, and finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the others find, its loader wrapped, for a module that is looked out for; else None."""
        if name not in _WATCHED:
            return None
        _WATCHED.discard(name)
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


def _loaded(module: ModuleType) -> None:
    try:
        from gradtap.runner.hooks import arm
    except ImportError as error:
        # This interpreter is not the one that gradtap is installed for. The parent hears why nothing was recorded.
        _tell_missing(error)
        return
    arm(module)


def _tell_missing(error: ImportError) -> None:
    import json

    try:
        work = json.loads(os.environ["_GRADTAP_RUN"])["work"]
        with open(os.path.join(work, f"{os.getpid()}.jsonl"), "a") as file:
            json.dump({"event": "missing", "python": sys.executable, "error": str(error)}, file)
            file.write("\n")
    except (OSError, KeyError, ValueError):
        pass


def _run_users_own() -> None:
    """Import the `sitecustomize` that would have been found without this one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if "_GRADTAP_RUN" in os.environ:
    sys.meta_path.insert(0, _Finder())
_run_users_own()
