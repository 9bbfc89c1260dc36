"""Why a chaos run ends early."""

from __future__ import annotations

from sglang_coserve.errors import CoserveError

__all__ = ["ChaosError"]


class ChaosError(CoserveError):
    """The server did not end, start or finish in time; what was seen so far is in the message."""
