"""The shape of the code, checked: who imports what, how large things are, what is public."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradtap
import gradtap.errors

PACKAGE = Path(gradtap.__file__).parent
SERVICE = PACKAGE.parent / "server" / "gradtap_server"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *SERVICE.rglob("*.py")])
ENGINES = ("torch", "deepspeed", "accelerate")
HEAVY = (
    *ENGINES,
    *("zarr", "numcodecs", "numpy", "pandas", "xarray", "dask", "safetensors", "ml_dtypes"),
    *("fastapi", "starlette", "uvicorn", "httpx2", "gradtap_server"),
)

MOST_LINES = 400
"""A file longer than this has two subjects."""

MOST_FUNCTION_LINES = 60
"""A function longer than this has two jobs."""


def loaded(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` a fresh interpreter has imported after running `code`."""
    script = f"import sys\n{code}\nprint(','.join(n for n in {names!r} if n in sys.modules))"
    # The child must find the same gradtap as this process, installed or not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return [name for name in done.stdout.splitlines()[-1].split(",") if name] if done.stdout.strip() else []


@pytest.mark.parametrize(
    "module",
    [
        *("gradtap", "gradtap.read", "gradtap.store", "gradtap.plan", "gradtap.encode"),
        *("gradtap.query", "gradtap.remote", "gradtap_server", "gradtap.cli.app"),
    ],
)
def test_readers_import_no_engine(module: str) -> None:
    """Whoever only reads needs no torch: importing these packages and all their modules leaves the engines out."""
    code = (
        f"import importlib, pkgutil\nroot = importlib.import_module({module!r})\n"
        f"inside = [] if {module!r} == 'gradtap' else getattr(root, '__path__', [])\n"
        f"[importlib.import_module(m.name) for m in pkgutil.walk_packages(inside, {module!r} + '.')]"
    )
    assert loaded(code, ENGINES) == []


def test_import_check_can_fail() -> None:
    """The check above sees an engine that was imported."""
    assert loaded("import torch", ENGINES) == ["torch"]


def test_importing_gradtap_is_light() -> None:
    """`import gradtap` loads no array package either: both halves come on first use."""
    assert loaded("import gradtap", HEAVY) == []


@pytest.mark.parametrize(
    "words", [["--help"], ["ls", "--help"], ["grad", "-h"], ["serve", "-h"], ["run", "-h"], ["--version"], ["verfy"]]
)
def test_help_is_light(words: list[str]) -> None:
    """Help, version and a misspelt verb load none of the heavy packages."""
    code = f"from gradtap.cli.app import main\nmain({words!r})"
    assert loaded(code, HEAVY) == []


def test_the_first_help_is_lighter_still() -> None:
    """`gradtap --help` does without what Typer itself loads to read the options of a verb."""
    assert loaded("from gradtap.cli.app import main\nmain(['--help'])", ("pydantic",)) == []


def test_public_names_are_the_surface() -> None:
    """`__all__` is sorted, holds every error, and every name of it can be had."""
    kinds = {name: value for name, value in vars(gradtap.errors).items() if isinstance(value, type)}
    errors = {name for name, kind in kinds.items() if issubclass(kind, gradtap.errors.GradtapError)}
    assert gradtap.__all__ == sorted(gradtap.__all__)
    assert set(gradtap.__all__) == errors | {"__version__", "attach", "open"}
    assert dir(gradtap) == gradtap.__all__
    assert all(getattr(gradtap, name) is not None for name in gradtap.__all__)


def test_no_other_public_name() -> None:
    """Nothing public is in the package's namespace but `__all__`, its modules and what typing needs."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    extra = {name for name in vars(gradtap) if not name.startswith("_")} - set(gradtap.__all__) - modules
    assert extra <= {"annotations", "TYPE_CHECKING", "Any"}


def test_unknown_attribute_is_an_attribute_error() -> None:
    """A name that is not there fails as in any module."""
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        gradtap.atach  # noqa: B018


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_files_and_functions_stay_small(path: Path) -> None:
    """No file has more than 400 lines, no function more than 60."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert long == []


def test_import_contracts_hold() -> None:
    """The layers of `pyproject.toml` hold: imports point downwards, and only capture and demo import an engine."""
    tool = Path(sys.executable).with_name("lint-imports")
    root = PACKAGE.parent
    environment = os.environ | {"PYTHONPATH": str(root), "NO_COLOR": "1"}
    done = subprocess.run([tool, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_test_says_its_fact() -> None:
    """Each test has a docstring: what must hold, in a sentence."""
    silent = []
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node):
                silent.append(f"{path.name}:{node.lineno} {node.name}")
    assert not silent, silent
