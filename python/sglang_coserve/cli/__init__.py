"""The ``coserve`` command: assembles the commands, one module each.

A module's signature is the command's; what it runs is imported when it runs, so
that ``coserve --help`` is quick and never loads torch.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import typer

from sglang_coserve import __version__
from sglang_coserve.cli.batches import cancel, delete, list_batches, results, status, top
from sglang_coserve.cli.console import code_of_error, say
from sglang_coserve.cli.profile import PROFILE_SETTINGS, make_model, profile
from sglang_coserve.cli.simulate import SeveralSlosCommand, replay, simulate
from sglang_coserve.cli.submit import submit
from sglang_coserve.cli.why import why
from sglang_coserve.errors import CoserveError, path_errors

__all__ = ["app", "main"]

_PASS_THROUGH = {**PROFILE_SETTINGS, "help_option_names": list[str]()}
"""Settings of a command that leave every flag to the server, also --help: its parser knows them."""


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
    rich_markup_mode="markdown",  # So that paragraphs fill the terminal.
)


def _add(command: Callable[..., None], example: str, **settings: Any) -> None:
    """Add a command whose help ends with an example; its name is the example's first word."""
    name = example.split()[0]
    app.command(name, epilog=f"Example: `coserve {example}`", **settings)(command)


_add(serve, "serve --model-path MODEL --port 30000", context_settings=_PASS_THROUGH)
_add(gateway, "gateway --engine http://gpu-1:30001", context_settings=_PASS_THROUGH)
_add(submit, "submit prompts.jsonl --window 2h -o results.jsonl")
_add(status, "status batch_1f0c")
_add(list_batches, "list --limit 5")
_add(cancel, "cancel batch_1f0c")
_add(delete, "delete batch_1f0c")
_add(results, "results batch_1f0c -o results.jsonl")
_add(top, "top --base-url http://gpu-1:30000")
_add(why, "why 5f0c1d --base-url http://gpu-1:30000")
_add(profile, "profile --model-path MODEL -o profile.json", context_settings=PROFILE_SETTINGS)
_add(
    simulate,
    "simulate --trace trace.csv --slo 'ttft p99 <= 300ms' -o report",
    cls=SeveralSlosCommand,
)
_add(replay, "replay plans.jsonl")
_add(make_model, "make-model small-model")
_add(version, "version")


def main() -> None:
    """Run the command line; the entry point of ``coserve``."""
    try:
        with path_errors():
            app()
    except CoserveError as error:
        say(f"coserve: {error}", is_error=True)
        sys.exit(code_of_error(error))
