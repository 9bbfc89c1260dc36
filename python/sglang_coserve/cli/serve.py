"""``coserve serve``: the same as ``python -m sglang_coserve.launch_server``."""

from __future__ import annotations

import os
import sys

import typer

__all__ = ["PASS_THROUGH", "serve"]

PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    # SGLang's parser prints the help: it knows the flags.
    "help_option_names": list[str](),
}
"""Settings of the command that leave every flag to the server."""


def serve(context: typer.Context) -> None:
    """Start the server; takes every flag of SGLang's and the coserve group (--help)."""
    # SGLang's processes import the main module again, so it must be the launcher.
    command = [sys.executable, "-m", "sglang_coserve.launch_server", *context.args]
    os.execv(sys.executable, command)
