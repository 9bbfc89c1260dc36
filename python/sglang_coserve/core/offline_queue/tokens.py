"""Token ids packed into bytes, so that comparing two prompts is a ``memcmp``."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final, NewType

from sglang_coserve.errors import RequestError

__all__ = ["TOKEN_BYTES", "PackedTokens", "common_prefix_bytes", "pack_tokens", "unpack_tokens"]

_TYPE: Final = "Q"
"""Images and sounds have placeholders of up to 62 bits in a prompt."""

TOKEN_BYTES: Final = array(_TYPE).itemsize
"""Bytes of one packed token id."""

PackedTokens = NewType("PackedTokens", bytes)
"""Token ids as native unsigned integers of ``TOKEN_BYTES`` bytes each, back to back."""


def pack_tokens(token_ids: Iterable[int]) -> PackedTokens:
    """Pack token ids. O(tokens).

    Raises:
        RequestError: an id is not an integer, is negative, or needs more than ``TOKEN_BYTES``.
    """
    try:
        return PackedTokens(array(_TYPE, token_ids).tobytes())
    except (OverflowError, TypeError) as error:
        raise RequestError(
            f"a prompt cannot be queued: {error}; "
            f"give token ids as integers from 0 to {256**TOKEN_BYTES - 1}"
        ) from error


def unpack_tokens(tokens: PackedTokens) -> memoryview:
    """Return the token ids as a read-only sequence of integers, without a copy."""
    return memoryview(tokens).cast(_TYPE)


def common_prefix_bytes(a: bytes, b: bytes, start: int, stop: int) -> int:
    """Return the end of the common prefix of ``a`` and ``b``, at a token boundary.

    The result is the largest token boundary n with ``start <= n <= stop`` and
    ``a[start:n] == b[start:n]``. Bisection compares at most twice the bytes of
    the range, all of them in C.
    """
    if a[start:stop] == b[start:stop]:
        return stop
    # The first difference is always in [start, stop).
    while stop - start > TOKEN_BYTES:
        middle = start + (stop - start) // (2 * TOKEN_BYTES) * TOKEN_BYTES
        if a[start:middle] == b[start:middle]:
            start = middle
        else:
            stop = middle
    return start
