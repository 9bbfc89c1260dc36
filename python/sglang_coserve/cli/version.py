"""``coserve version``."""

from __future__ import annotations

import platform
from importlib import metadata

from sglang_coserve import __version__
from sglang_coserve.cli.say import say

__all__ = ["version"]


def version() -> None:
    """Print the versions to quote in a bug report."""
    try:
        sglang = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        sglang = "not installed"
    say(f"coserve {__version__}, sglang {sglang}, python {platform.python_version()}")
