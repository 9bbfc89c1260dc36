"""Request classes and the lifecycle of a request, as a table of legal transitions."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Final

from sglang_coserve.errors import UnknownClassError

__all__ = ["LEGAL_TRANSITIONS", "Ending", "RequestClass", "RequestState", "check_transition"]


class RequestClass(Enum):
    """How much a request may be delayed for another.

    The papers' names: ConServe, HyGen and OOCO say online and offline, BROS
    says RT and BE.
    """

    ONLINE = "online"
    """Latency-critical: keeps its TTFT and TPOT targets as if it were alone."""

    OFFLINE = "offline"
    """Best-effort: runs in whatever online requests leave over."""

    @classmethod
    def parse(cls, text: object) -> RequestClass:
        """Return the class named ``text``.

        Raises:
            UnknownClassError: ``text`` is none of the class names.
        """
        for member in cls:
            if text == member.value:
                return member
        valid = " or ".join(repr(member.value) for member in cls)
        raise UnknownClassError(f"unknown request class {text!r}: use {valid}")


class RequestState(Enum):
    """Where a request stands. Only ``FINISHED`` and ``ABORTED`` are final."""

    WAITING = "waiting"
    """Holds no KV of its own; may have progress kept in the cache or a checkpoint."""

    PREFILLING = "prefilling"
    """Part of its prompt is computed, in one or several chunks."""

    PARKED = "parked"
    """An unfinished prefill that gave way; its KV is kept."""

    DECODING = "decoding"
    """Produces one token an iteration."""

    PAUSED = "paused"
    """A decode that skips the steps of the shared lane; its KV is kept. An offline one runs in
    those of the offline lane."""

    FINISHED = "finished"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        """True when the request has ended."""
        return self in (RequestState.FINISHED, RequestState.ABORTED)

    @property
    def holds_kv(self) -> bool:
        """True when the request owns device KV slots."""
        return self in (
            RequestState.PREFILLING,
            RequestState.PARKED,
            RequestState.DECODING,
            RequestState.PAUSED,
        )


_S = RequestState


class Ending(Enum):
    """How a request ended."""

    COMPLETE = "complete"
    """It has all its tokens."""

    REFUSED = "refused"
    """The server gave it up."""

    ABORTED = "aborted"
    """Its client took it back, which says nothing about the server."""


LEGAL_TRANSITIONS: Final = MappingProxyType(
    {
        # A prompt that fits one iteration goes straight to DECODING.
        _S.WAITING: frozenset({_S.PREFILLING, _S.DECODING, _S.FINISHED, _S.ABORTED}),
        # PREFILLING -> WAITING is a retraction, or a step that was dropped.
        # PREFILLING -> PAUSED ends in the offline lane.
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
"""Every state a request may enter from each state."""


def check_transition(current: RequestState, new: RequestState) -> RequestState:
    """Return ``new`` when a request may go there from ``current``.

    An illegal transition is a bug of the caller, never of a user, hence an
    ``AssertionError``; nothing is changed.
    """
    assert new in LEGAL_TRANSITIONS[current], f"illegal transition {current.name} -> {new.name}"
    return new
