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
from typing import Any, Final

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.bounds import check_number

__all__ = [
    "CLASS_KEY",
    "DEADLINE_KEY",
    "MARK_PREFIX",
    "TPOT_KEY",
    "TTFT_KEY",
    "TTL_KEY",
    "arrival_s",
    "check_line_marks",
    "check_marks",
    "check_targets_act",
    "is_offline",
    "said_by_client",
    "targets_of",
    "with_client_marks",
]

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

TTL_KEY: Final = "_coserve_ttl_s"
"""The same, from a gateway, which may send it with requests of either class; ignored for online
ones."""

_SAID: Final[ContextVar[Mapping[str, Any] | None]] = ContextVar(
    "marks that the client gave the request being served", default=None
)

_TARGET_KEYS: Final = (TTFT_KEY, TPOT_KEY)
_MARKS: Final = (CLASS_KEY, *_TARGET_KEYS, DEADLINE_KEY)


@contextmanager
def said_by_client(marks: Mapping[str, Any]) -> Iterator[None]:
    """Make ``with_client_marks`` add ``marks``, which need no check before, in this context."""
    token = _SAID.set(marks)
    try:
        yield
    finally:
        _SAID.reset(token)


def with_client_marks(custom_params: object, *, keeps_deadlines: bool = True) -> object:
    """Return ``custom_params`` with the marks found elsewhere in the request added; check all.

    Without ``keeps_deadlines``, i.e. if the server has none, a gateway's deadline is ignored.

    Raises:
        RequestError: a mark is invalid (``check_marks``), two marks contradict each other, or
            the client asks for a deadline and the server keeps none.
    """
    said = _SAID.get()
    ttl_s = None
    if said and isinstance(custom_params, dict | None):
        within = custom_params or {}
        marked = dict(said)
        ttl_s = marked.pop(TTL_KEY, None)
        for key, value in marked.items():
            if within.get(key) is not None and within[key] != value:
                values = f"{value!r}, and {within[key]!r} in custom_params"
                raise RequestError(f"contradicting values of {key}: {values}")
        custom_params = {**within, **marked}
    check_marks(custom_params)
    marks = _marks_in(custom_params)
    if DEADLINE_KEY in marks and not keeps_deadlines:
        raise RequestError(
            f"this server keeps no {DEADLINE_KEY}: its --offline-policy fifo serves offline "
            "requests in order of arrival; leave it out, or start the server with another policy"
        )
    has_deadline = ttl_s is not None and marks.get(CLASS_KEY) == RequestClass.OFFLINE.value
    if has_deadline and keeps_deadlines:
        assert isinstance(custom_params, dict)
        check_number(DEADLINE_KEY, ttl_s)
        custom_params = {**custom_params, DEADLINE_KEY: ttl_s}
    return custom_params


def check_marks(custom_params: object) -> None:
    """Check all marks of a request; without any it is online. Null values are ignored.

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
        check_number(key, marks[key])
    if DEADLINE_KEY not in marks:
        return
    if request_class is RequestClass.ONLINE:
        raise RequestError(
            f"{DEADLINE_KEY} is for offline requests, and this one is online: leave it out, or "
            f"make the request offline; online requests may have {TTFT_KEY} and {TPOT_KEY}"
        )
    check_number(DEADLINE_KEY, marks[DEADLINE_KEY])


def check_targets_act(custom_params: object, config: CoserveConfig) -> None:
    """Check that the policy observes the targets that a request brings along, if any.

    Raises:
        RequestError: the request has a target, and the policy ignores targets.
    """
    if not config.ignores_targets:
        return
    for key in _TARGET_KEYS:
        if key in _marks_in(custom_params):
            raise RequestError(
                f"{key} has no effect on a server with --offline-policy {config.offline_policy}: "
                "leave it out"
            )


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


def is_offline(req: Any) -> bool:
    """Return whether SGLang's ``Req`` is offline. Its marks were checked on arrival."""
    custom_params = req.sampling_params.custom_params
    return isinstance(custom_params, dict) and custom_params.get(CLASS_KEY) == _OFFLINE


def targets_of(req: Any) -> tuple[float | None, float | None]:
    """Return the TTFT and TPOT targets that SGLang's ``Req`` brings along, in seconds.

    None for a target that it does not bring. Its marks were checked on arrival.
    """
    custom_params = req.sampling_params.custom_params
    if not isinstance(custom_params, dict):
        return None, None
    return _seconds(custom_params.get(TTFT_KEY)), _seconds(custom_params.get(TPOT_KEY))


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


def arrival_s(received: Any, now_s: float) -> float:
    """Return when a request arrived, at most ``now_s``; ``now_s`` if unknown.

    ``received`` is SGLang's ``Req``, or the message that it is made from. The clock is
    ``time.perf_counter`` of this process.
    """
    created_s = getattr(getattr(received, "time_stats", None), "created_time", 0.0)
    return min(created_s, now_s) if created_s else now_s
