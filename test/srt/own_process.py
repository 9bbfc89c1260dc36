"""Scripts in a process of their own, for what belongs to a process: metrics, say."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["printed_by"]


def printed_by(script: str) -> list[str]:
    """Return the lines that a Python script prints; it must succeed within five minutes."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
