"""The ``coserve`` command: assembles the commands, one module each.

A module's signature is the command's; what it runs is imported when it runs, so
that ``coserve --help`` is quick and never loads torch.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import typer

from sglang_coserve import __version__
from sglang_coserve.cli.batches import cancel, list_batches, results, status
from sglang_coserve.cli.console import ExitCode, code_of_error, say
from sglang_coserve.cli.make_model import make_model
from sglang_coserve.cli.profile import PROFILE_SETTINGS, profile
from sglang_coserve.cli.replay import replay
from sglang_coserve.cli.simulate import SeveralSlosCommand, simulate
from sglang_coserve.cli.submit import submit
from sglang_coserve.cli.top import top
from sglang_coserve.errors import CoserveError

__all__ = ["app", "main"]

_PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    # SGLang's parser prints the help: it knows the flags.
    "help_option_names": list[str](),
}
"""Settings of a command that leave every flag to the server."""


def gateway(context: typer.Context) -> None:
    """Serve batches on many engines; neither torch nor SGLang is needed here (--help)."""
    from sglang_coserve.fleet.__main__ import main

    sys.exit(main(context.args))


def serve(context: typer.Context) -> None:
    """Start the server; takes every flag of SGLang's and the coserve group (--help)."""
    # SGLang's processes import the main module again, so it must be the launcher.
    command = [sys.executable, "-m", "sglang_coserve.launch_server", *context.args]
    os.execv(sys.executable, command)


def version() -> None:
    """Print the versions to quote in a bug report."""
    try:
        sglang = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        sglang = "not installed"
    say(f"coserve {__version__}, sglang {sglang}, python {platform.python_version()}")


app = typer.Typer(
    help="Online and offline requests on one SGLang engine.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(context_settings=_PASS_THROUGH)(serve)
app.command(context_settings=_PASS_THROUGH)(gateway)
app.command()(submit)
app.command()(status)
app.command("list")(list_batches)
app.command()(cancel)
app.command()(results)
app.command()(top)
app.command(context_settings=PROFILE_SETTINGS)(profile)
app.command(cls=SeveralSlosCommand)(simulate)
app.command()(replay)
app.command()(make_model)
app.command()(version)


def main() -> None:
    """Run the command line; the entry point of ``coserve``."""
    try:
        app()
    except CoserveError as error:
        say(f"coserve: {error}", is_error=True)
        sys.exit(code_of_error(error))
    except OSError as error:
        if error.filename is None:
            raise
        say(f"coserve: {error.filename}: {error.strerror}", is_error=True)
        sys.exit(ExitCode.USAGE)
