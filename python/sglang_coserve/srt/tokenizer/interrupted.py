"""Lets an offline request that was cut off, and is sent again, go on after the tokens that it had.

A gateway that wants the engine for others evicts a request: it closes the connection, and sends the
same request again later, with the same id in a header. What was generated until then is kept here;
the second request begins with it, as a line of a batch does that was interrupted.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import msgspec

__all__ = ["InterruptedRequests", "identity_of", "key_of"]

_ID_HEADERS: Final = ("idempotency-key", "x-request-id")
_OWNER_HEADERS: Final = ("authorization", "x-api-key")

_KEPT_S: Final = 3600.0
_MOST_REQUESTS: Final = 4096
_MOST_TOKENS: Final = 1 << 20
"""Of all requests; 36 MB."""


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return what names a request and whoever sends it; None if it has no name."""
    name = next((headers[each] for each in _ID_HEADERS if headers.get(each)), None)
    owner = [headers.get(each, "") for each in _OWNER_HEADERS]
    return None if name is None else "\n".join((name, *owner))


def identity_of(key: str, tokenized: Any, weights: str) -> bytes:
    """Return what two requests have in common of which the second goes on with the first.

    Its key, its prompt and its parameters, but for what is said of its class; ``tokenized`` is
    SGLang's message to the scheduler, ``weights`` the name of what generates the tokens.
    """
    params = msgspec.structs.replace(tokenized.sampling_params, custom_params=None)
    parts = (key.encode(), weights.encode(), array("q", tokenized.input_ids).tobytes())
    digest = blake2b(msgspec.msgpack.encode(params), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _Interrupted:
    tokens: Sequence[int]
    """SGLang's list of them, to which the last ones are added after the client has left."""

    before: Sequence[int]
    """Those that it began with."""

    num_tokens: int
    until_s: float


class InterruptedRequests:
    """What requests had generated whose clients left, for an hour, and for each request once."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._kept: dict[bytes, _Interrupted] = {}
        self._num_tokens = 0

    def keep(self, identity: bytes, tokens: Sequence[int], before: Sequence[int]) -> None:
        """Keep the ``tokens`` of a request, of which those ``before`` may not have come back yet.

        The oldest ones give way. O(1), but for those.
        """
        self._take(identity)
        until_s = self._now_s() + _KEPT_S
        num_tokens = max(len(tokens), len(before))
        self._kept[identity] = _Interrupted(tokens, before, num_tokens, until_s)
        self._num_tokens += num_tokens
        while len(self._kept) > _MOST_REQUESTS or self._num_tokens > _MOST_TOKENS:
            self._take(next(iter(self._kept)))

    def take(self, identity: bytes) -> list[int]:
        """Return the tokens that a request goes on after; empty if nothing is known of it.

        Without the last one: SGLang takes it from the step during which the request is aborted, and
        does not look any more whether it ends the generation.
        """
        kept = self._take(identity)
        if kept is None or kept.until_s < self._now_s():
            return []
        tokens = kept.tokens[:-1]
        return list(tokens if len(tokens) > len(kept.before) else kept.before)

    def _take(self, identity: bytes) -> _Interrupted | None:
        kept = self._kept.pop(identity, None)
        self._num_tokens -= kept.num_tokens if kept is not None else 0
        return kept
