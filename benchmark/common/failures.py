"""What can go wrong with one run without ending the benchmark."""

from __future__ import annotations

from sglang_coserve.errors import CoserveError

__all__ = ["RunFailedError"]


class RunFailedError(CoserveError):
    """A run gave no result; the others go on, and the same command tries it again."""
