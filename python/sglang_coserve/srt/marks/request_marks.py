"""The marks of a request (class, targets, deadline), and how they travel through SGLang.

``sampling_params.custom_params`` is the one field that reaches the scheduler's
``Req`` unchanged from every entry point.  Marks found elsewhere in an HTTP request, in its body
or in headers, are kept in a context variable until they are added there.  Marks are checked
once, before the request is sent to the scheduler (``tokenizer_manager``); the scheduler then
reads them without checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError
from sglang_coserve.number_bounds import Bound, check_number

MARK_PREFIX = "coserve_"
"""Prefix of the keys in ``custom_params`` and in bodies that are marks."""

CLASS_KEY = "coserve_class"
"""The request's class, "online" or "offline"."""

_OFFLINE: Final = RequestClass.OFFLINE.value

_INTERNAL_PREFIX: Final = "_coserve"
"""Prefix of the keys that only the server itself may set (``offline_marks``)."""

TTFT_KEY = "coserve_slo_ttft_ms"
"""An online request's own TTFT target in milliseconds, instead of the server's."""

TPOT_KEY = "coserve_slo_tpot_ms"
"""An online request's own TPOT target in milliseconds, instead of the server's."""

DEADLINE_KEY = "coserve_deadline_s"
"""Seconds from its arrival within which an offline request should be finished."""

_LEAST_MS: Final = 1e-3
"""No step of an engine is as short as a microsecond, so a shorter time asks for nothing more; the
inverse and the logarithm of this one are ordinary numbers."""

_MOST_MS: Final = 1e9
"""11 days, small enough for an integer to reach the scheduler."""

_MOST_S: Final = 1e9
"""31 years."""

_BOUNDS: Final[Mapping[str, Bound]] = {
    TTFT_KEY: Bound(_LEAST_MS, _MOST_MS, "milliseconds"),
    TPOT_KEY: Bound(_LEAST_MS, _MOST_MS, "milliseconds"),
    DEADLINE_KEY: Bound(_LEAST_MS / 1e3, _MOST_S, "seconds"),
}


@dataclass(frozen=True, slots=True)
class GatewayHints:
    """What a gateway says of a request whose class it may not know: what is of no use is ignored,
    and what is out of bounds means the nearest value within."""

    objective: str | None = None
    """An objective that the operator has defined, which says the class."""

    ttft_ms: float | None = None
    """When its first token is due. The TTFT target of an online request, none if 0; an offline one
    has its deadline then."""

    tpot_ms: float | None = None
    """The TPOT target of an online request, none if 0."""

    ttl_s: float | None = None
    """Within how many seconds an offline request should be finished."""

    def marks(self, request_class: RequestClass, config: CoserveConfig) -> dict[str, float]:
        """Return the marks of a request of this class. O(1)."""
        if request_class is RequestClass.OFFLINE:
            starts_in_s = None if self.ttft_ms is None else self.ttft_ms / 1e3
            due_in_s = [each for each in (self.ttl_s, starts_in_s) if each is not None]
            if not due_in_s:
                return {}
            return {DEADLINE_KEY: _nearest(DEADLINE_KEY, min(due_in_s))}
        asked = {TTFT_KEY: self.ttft_ms, TPOT_KEY: self.tpot_ms}
        targets = {key: _nearest(key, value) for key, value in asked.items() if value}
        return {} if targets and config.ignores_targets else targets


def _nearest(key: str, value: float) -> float:
    return min(max(value, _BOUNDS[key].least), _BOUNDS[key].most)


_NO_HINTS: Final = GatewayHints()

_SAID: Final[ContextVar[tuple[Mapping[str, Any], GatewayHints]]] = ContextVar(
    "what client and gateway say of the request being served", default=({}, _NO_HINTS)
)

_TARGET_KEYS: Final = (TTFT_KEY, TPOT_KEY)
_MARKS: Final = (CLASS_KEY, *_TARGET_KEYS, DEADLINE_KEY)


@contextmanager
def said_by_client(marks: Mapping[str, Any], hints: GatewayHints = _NO_HINTS) -> Iterator[None]:
    """Make ``with_client_marks`` add ``marks``, which need no check before, and those of ``hints``
    in this context."""
    token = _SAID.set((marks, hints))
    try:
        yield
    finally:
        _SAID.reset(token)


def with_client_marks(
    custom_params: dict[str, Any] | None, config: CoserveConfig
) -> dict[str, Any] | None:
    """Return ``custom_params`` with the marks found elsewhere in the request added; check all.

    Raises:
        RequestError: a mark is invalid (``check_marks``), two marks contradict each other, or
            the client asks for a target that the server's policy ignores.
    """
    said, hints = _SAID.get()
    within = custom_params or {}
    for key, value in said.items():
        if key == CLASS_KEY and hints.objective is not None:
            continue  # It is the gateway's, and wins.
        if within.get(key) is not None and within[key] != value:
            values = f"{value!r}, and {within[key]!r} in custom_params"
            raise RequestError(f"contradicting values of {key}: {values}")
    if said:
        custom_params = {**within, **said}
        if hints.objective is not None:
            # The client may have meant the other class.
            useless = _TARGET_KEYS if said[CLASS_KEY] == _OFFLINE else (DEADLINE_KEY,)
            custom_params = {k: v for k, v in custom_params.items() if k not in useless}
    marks = check_marks(custom_params)
    for key in _TARGET_KEYS:
        if key in marks and config.ignores_targets:
            raise RequestError(
                f"{key} has no effect on a server with --offline-policy {config.offline_policy}: "
                "leave it out"
            )
    request_class = RequestClass.parse(marks.get(CLASS_KEY, RequestClass.ONLINE.value))
    hinted = hints.marks(request_class, config)
    return {**(custom_params or {}), **hinted} if hinted else custom_params


def check_marks(custom_params: object) -> dict[str, Any]:
    """Check all marks of a request, and return them; without any it is online. Null values are
    ignored.

    Raises:
        RequestError: a mark is unknown, may be set by the server only, or has an invalid
            value; or an offline request has a target, or an online one a deadline.
    """
    marks = _marks_in(custom_params)
    for key in marks:
        if key.startswith(_INTERNAL_PREFIX):
            raise RequestError(f"{key!r} in custom_params is set by the server only: leave it out")
        if key not in _MARKS:
            raise RequestError(f"unknown field {key!r}: co-serving knows {', '.join(_MARKS)}")
    request_class = RequestClass.parse(marks.get(CLASS_KEY, RequestClass.ONLINE.value))
    for key in _TARGET_KEYS:
        if key not in marks:
            continue
        if request_class is RequestClass.OFFLINE:
            raise RequestError(
                f"{key} is for online requests, and this one is offline: leave it out; offline "
                f"requests may have {DEADLINE_KEY}, and batches have their completion window"
            )
        check_number(key, marks[key], _BOUNDS[key])
    if DEADLINE_KEY in marks:
        if request_class is RequestClass.ONLINE:
            raise RequestError(
                f"{DEADLINE_KEY} is for offline requests, and this one is online: leave it out, or "
                f"make the request offline; online requests may have {TTFT_KEY} and {TPOT_KEY}"
            )
        check_number(DEADLINE_KEY, marks[DEADLINE_KEY], _BOUNDS[DEADLINE_KEY])
    return marks


def check_line_marks(body: Mapping[str, Any]) -> None:
    """Check the marks of a batch line, which may only say that it is offline.

    Raises:
        RequestError: the line or its ``custom_params`` has any other mark.
    """
    for key, value in (*_marks_in(body).items(), *_marks_in(body.get("custom_params")).items()):
        if key != CLASS_KEY:
            raise RequestError(f"{key!r} has no place in a line of a batch: leave it out")
        if value != RequestClass.OFFLINE.value:
            raise RequestError(f"{key} is {value!r}: lines of a batch are offline: leave it out")


def mark_of(req: Any, key: str) -> Any:
    """Return a mark of SGLang's ``Req``, which was checked on arrival; None without it."""
    custom_params = req.sampling_params.custom_params
    return custom_params.get(key) if isinstance(custom_params, dict) else None


def is_offline(req: Any) -> bool:
    """Return whether SGLang's ``Req`` is offline."""
    return bool(mark_of(req, CLASS_KEY) == _OFFLINE)


def targets_of(req: Any) -> tuple[float | None, float | None]:
    """Return the TTFT and TPOT targets that SGLang's ``Req`` brings along, in seconds.

    None for a target that it does not bring.
    """
    return _seconds(mark_of(req, TTFT_KEY)), _seconds(mark_of(req, TPOT_KEY))


def _marks_in(fields: object) -> dict[str, Any]:
    """Return the marks among ``fields``, including the server's; null values are left out."""
    if not isinstance(fields, dict):
        return {}
    return {
        key: value
        for key, value in fields.items()
        if isinstance(key, str)
        and key.startswith((MARK_PREFIX, _INTERNAL_PREFIX))
        and (value is not None or key.startswith(_INTERNAL_PREFIX))
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def sent_s(req: Any) -> float | None:
    """Return when the HTTP server's process sent SGLang's ``Req`` to the scheduler.

    The clock is ``time.perf_counter`` of this process. None if unknown. Also None if the call asked
    for several choices: SGLang sends a request for the prompt before, and waits for its end.
    """
    sent_s: float = req.time_stats.api_server_dispatch_time
    return sent_s if sent_s and req.sampling_params.n == 1 else None


def arrival_s(received: Any, now_s: float) -> float:
    """Return when a request arrived, at most ``now_s``; ``now_s`` if unknown.

    ``received`` is SGLang's ``Req``, or the message that it is made from. The clock is
    ``time.perf_counter`` of this process.
    """
    created_s = getattr(getattr(received, "time_stats", None), "created_time", 0.0)
    return min(created_s, now_s) if created_s else now_s
