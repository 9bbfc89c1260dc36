"""An offline request in the queue; its token ids are packed, so that prompts compare fast."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NewType

from sglang_coserve.errors import RequestError

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


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """An offline request, with the progress it had when it was last retracted.

    Raises:
        RequestError: the prompt is empty, a time is not finite, or a count is negative.
    """

    rid: str
    """The engine's id of the request, unique in a queue."""

    token_ids: PackedTokens
    """The prompt, from ``pack_tokens``."""

    arrival_s: float
    """When it was submitted, on the clock that ``now_s`` is read from."""

    max_new_tokens: int
    """Most output tokens that it may generate."""

    num_generated_tokens: int = 0
    """Output tokens it has produced so far."""

    deadline_s: float | None = None
    """Time by which it must have finished; ``None`` for no deadline."""

    estimated_service_s: float = 0.0
    """Predicted time from its next start to its end."""

    expected_output_tokens: int | None = None
    """Expected total of output tokens; ``None`` assumes ``max_new_tokens``."""

    def __post_init__(self) -> None:
        """Check that the request can be served and ordered."""
        if not self.token_ids:
            raise self._error("its prompt has no tokens", "send at least one token")
        if not math.isfinite(self.arrival_s):
            raise self._error(f"arrival_s is {self.arrival_s}", "give a finite time")
        if self.deadline_s is not None and not math.isfinite(self.deadline_s):
            raise self._error(f"deadline_s is {self.deadline_s}", "give a finite time or None")
        if not 0 <= self.estimated_service_s < math.inf:
            raise self._error(
                f"estimated_service_s is {self.estimated_service_s}", "give a time of at least 0"
            )
        if self.max_new_tokens < 0 or self.num_generated_tokens < 0:
            raise self._error(
                f"max_new_tokens is {self.max_new_tokens} and num_generated_tokens "
                f"{self.num_generated_tokens}",
                "neither may be negative",
            )
        if self.expected_output_tokens is not None and self.expected_output_tokens < 0:
            raise self._error(
                f"expected_output_tokens is {self.expected_output_tokens}", "give at least 0"
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def latest_start_s(self) -> float | None:
        """The latest time at which a start is predicted to meet the deadline; None without one."""
        return None if self.deadline_s is None else self.deadline_s - self.estimated_service_s

    @property
    def expected_tokens_left(self) -> int:
        """Expected number of remaining output tokens; at least 1 while more may come."""
        expected = self.max_new_tokens
        if self.expected_output_tokens is not None:
            expected = min(expected, self.expected_output_tokens)
        may_come = max(0, self.max_new_tokens - self.num_generated_tokens)
        return min(may_come, max(1, expected - self.num_generated_tokens))

    def _error(self, wrong: str, mend: str) -> RequestError:
        return RequestError(f"offline request {self.rid!r} cannot be queued: {wrong}; {mend}")
