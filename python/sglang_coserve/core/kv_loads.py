"""How much KV is on its way from host memory to the device at a time."""

from __future__ import annotations

from typing import Final

_LOADED_TOKENS: Final = 4096
_LOADED_SHARE: Final = 0.25
"""Most tokens loaded at a time, absolute and as a share of the device's KV: that much is lost if
loads get stuck."""


def most_loaded_tokens(device_tokens: int) -> int:
    """Return how many tokens may be on their way from host memory, of a device with so many."""
    return min(_LOADED_TOKENS, int(_LOADED_SHARE * device_tokens))
