"""The table of verbs, and the way in and out of the process. No verb's work is done here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gradtap.cli import audit, demo, doctor, get, grad, hist, info, ls, norms, run, serve, show, steps, verify, watch
from gradtap.cli.exits import escaping_streams, guarded
from gradtap.errors import UsageError, near_names, nearest
from gradtap.version import __version__


class Verbs(TyperGroup):
    """The group of verbs; a word that is none is answered with the nearest ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that `args` begins with. Raises `UsageError` for an unknown one."""
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-") and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            raise UsageError(f"no verb {word!r}{nearest(word, known) or '; there are ' + ', '.join(known)}").noting(
                did_you_mean=near_names(word, known)
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Verbs,
    name="gradtap",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Record every full gradient of a sharded training run, and read it back while training runs.",
    epilog=(
        "STORE is the folder of a run, a folder of runs (with --run NAME), or a server's address. "
        "Exit codes: 0 done; 1 a check or the audit found something, or another error of gradtap; 2 usage; 3 no "
        "readable run, or a newer format; 4 run, step or parameter not found; 5 damage; 6 authentication or "
        "permission; 7 limit exceeded or time-out; 8 an extra is not installed; 9 locked; 10 capture failed; 130 "
        "interrupted; 141 output closed or full."
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"gradtap {__version__}\n")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options before the verb."""


VERBS = (
    *(demo.demo, info.info, ls.ls, steps.steps, show.show, grad.grad, norms.norms, hist.hist),
    *(audit.audit, verify.verify, watch.watch, serve.serve, get.get, doctor.doctor),
)
for _verb in VERBS:
    app.command()(_verb)
# What follows the command's own name is the command's.
app.command(context_settings={"allow_interspersed_args": False})(run.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and give its exit code. Prints; raises only for a bug."""
    escaping_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_GRADTAP_COMPLETE" in os.environ:
        app(words, prog_name="gradtap")  # a shell asks for completions; ends the process
    return guarded(lambda: _invoke(words), words)


def _invoke(words: list[str]) -> None:
    # Not Typer's own main: it turns a closed pipe into exit code 1.
    command = typer.main.get_command(app)
    with command.make_context("gradtap", words) as context:
        command.invoke(context)
