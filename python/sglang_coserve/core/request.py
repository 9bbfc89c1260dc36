"""Request classes and the lifecycle of a request, as a table of legal transitions."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Final

from sglang_coserve.errors import RequestError


class RequestClass(Enum):
    """The priority class of a request.

    ConServe, HyGen and OOCO call the classes online and offline, BROS calls them RT and BE.
    """

    ONLINE = "online"
    """Latency-critical: has TTFT and TPOT targets, which offline work must not make it miss."""

    OFFLINE = "offline"
    """Best-effort: runs in the time and memory that online requests leave."""

    @classmethod
    def parse(cls, text: object) -> RequestClass:
        """Return the class named ``text``.

        Raises:
            RequestError: ``text`` is none of the class names.
        """
        for member in cls:
            if text == member.value:
                return member
        valid = " or ".join(repr(member.value) for member in cls)
        raise RequestError(f"unknown request class {text!r}: use {valid}")


class RequestState(Enum):
    """State of a request. Only ``FINISHED`` and ``ABORTED`` are final."""

    WAITING = "waiting"
    """Holds no KV of its own; may have progress in the prefix cache or a checkpoint."""

    PREFILLING = "prefilling"
    """Its prompt is being computed, in one or several chunks."""

    PARKED = "parked"
    """An unfinished prefill that skips steps; its KV is kept."""

    DECODING = "decoding"
    """Generates one token per step."""

    PAUSED = "paused"
    """A decode that skips the steps of the shared lane; its KV is kept. An offline request in this
    state decodes in the steps of the offline lane."""

    FINISHED = "finished"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        """True when the request has ended."""
        return self in (RequestState.FINISHED, RequestState.ABORTED)


_S = RequestState


class Ending(Enum):
    """How a request ended."""

    COMPLETE = "complete"
    """It got all its tokens."""

    REFUSED = "refused"
    """The server refused, aborted or lost it: it counts as a miss."""

    ABORTED = "aborted"
    """Its client took it back, or asked for what cannot be served: neither counts against the
    server."""


LEGAL_TRANSITIONS: Final = MappingProxyType(
    {
        # A prompt that fits one step goes straight to DECODING.
        _S.WAITING: frozenset({_S.PREFILLING, _S.DECODING, _S.FINISHED, _S.ABORTED}),
        # PREFILLING -> WAITING is a retraction, or a step that was dropped.
        # PREFILLING -> PAUSED: a prefill that ends in the offline lane.
        _S.PREFILLING: frozenset(
            {_S.DECODING, _S.PAUSED, _S.PARKED, _S.WAITING, _S.FINISHED, _S.ABORTED}
        ),
        _S.PARKED: frozenset({_S.PREFILLING, _S.WAITING, _S.ABORTED}),
        # DECODING -> WAITING is a retraction.
        _S.DECODING: frozenset({_S.PAUSED, _S.WAITING, _S.FINISHED, _S.ABORTED}),
        # With overlap scheduling the last token of a request can arrive after it was paused.
        _S.PAUSED: frozenset({_S.DECODING, _S.WAITING, _S.FINISHED, _S.ABORTED}),
        _S.FINISHED: frozenset[RequestState](),
        _S.ABORTED: frozenset[RequestState](),
    }
)
"""For each state, the states that a request may enter from it."""
