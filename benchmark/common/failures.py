"""How a program that judges a run ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from sglang_coserve.errors import CoserveError
from sglang_coserve.interrupts import terminate_as_interrupt

__all__ = ["exit_status"]


def exit_status(run: Callable[[], bool], *, interrupted: str) -> int:
    """Run a benchmark; return 0 if it met its targets, else 1; 2 after an error, 130 after Ctrl-C.

    An error, or ``interrupted`` after Ctrl-C, is printed after the script's name.
    """
    try:
        with terminate_as_interrupt():
            return 0 if run() else 1
    except CoserveError as error:
        reason, status = str(error), 2
    except KeyboardInterrupt:
        reason, status = f"interrupted{interrupted}", 130
    print(f"{Path(sys.argv[0]).stem}: {reason}", file=sys.stderr)
    return status
