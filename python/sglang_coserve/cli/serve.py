"""``coserve serve`` and ``coserve gateway``: each is another module as a command."""

from __future__ import annotations

import os
import sys

import typer

__all__ = ["PASS_THROUGH", "gateway", "serve"]

PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    # SGLang's parser prints the help: it knows the flags.
    "help_option_names": list[str](),
}
"""Settings of the command that leave every flag to the server."""


def gateway(context: typer.Context) -> None:
    """Serve batches on many engines; neither torch nor SGLang is needed here (--help)."""
    from sglang_coserve.fleet.command import main

    sys.exit(main(context.args))


def serve(context: typer.Context) -> None:
    """Start the server; takes every flag of SGLang's and the coserve group (--help)."""
    # SGLang's processes import the main module again, so it must be the launcher.
    command = [sys.executable, "-m", "sglang_coserve.launch_server", *context.args]
    os.execv(sys.executable, command)
