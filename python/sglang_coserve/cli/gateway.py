"""``coserve gateway``: one Batch API in front of many engines."""

from __future__ import annotations

import sys

import typer

__all__ = ["gateway"]


def gateway(context: typer.Context) -> None:
    """Serve batches on many engines; neither torch nor SGLang is needed here (--help)."""
    from sglang_coserve.fleet.command import main

    sys.exit(main(context.args))
