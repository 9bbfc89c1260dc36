"""What a request asks of co-serving, and how that travels through SGLang.

``sampling_params.custom_params`` is the one field that reaches the scheduler's
``Req`` unchanged from every door.  What a request over HTTP says elsewhere, in its body
or in headers, a context variable holds until it is put there.  Marks are checked once,
before the request is sent to the scheduler (``tokenizer_manager``); the scheduler then
reads them without a check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError

__all__ = [
    "CLASS_KEY",
    "MARK_PREFIX",
    "TPOT_KEY",
    "TTFT_KEY",
    "check_line_marks",
    "check_marks",
    "check_targets_act",
    "is_offline",
    "said_by_client",
    "targets_of",
    "with_client_marks",
]

MARK_PREFIX = "coserve_"
"""Keys of ``custom_params``, and of an OpenAI body, that begin so are marks."""

CLASS_KEY = "coserve_class"
"""Names the request's class."""

_INTERNAL_PREFIX: Final = "_coserve"
"""Keys that begin so are for the server itself (``offline_marks``)."""

TTFT_KEY = "coserve_slo_ttft_ms"
"""An online request's own TTFT target in milliseconds, instead of the server's."""

TPOT_KEY = "coserve_slo_tpot_ms"
"""An online request's own TPOT target in milliseconds, instead of the server's."""

_SAID: Final[ContextVar[Mapping[str, Any] | None]] = ContextVar(
    "marks that the client gave the request being served", default=None
)

_TARGET_KEYS: Final = (TTFT_KEY, TPOT_KEY)
_MARKS: Final = (CLASS_KEY, *_TARGET_KEYS)

_MOST_MS: Final = 1e9
"""Longer than any target (11 days), and short enough for an integer to reach the scheduler."""


@contextmanager
def said_by_client(marks: Mapping[str, Any]) -> Iterator[None]:
    """Within it, ``with_client_marks`` adds ``marks``, of which no check is needed before."""
    token = _SAID.set(marks)
    try:
        yield
    finally:
        _SAID.reset(token)


def with_client_marks(custom_params: object) -> object:
    """Return ``custom_params`` with the marks that came beside them; check all.

    Raises:
        RequestError: a mark is invalid (``check_marks``), or two contradict each other.
    """
    said = _SAID.get()
    if said and isinstance(custom_params, dict | None):
        within = custom_params or {}
        for key, value in said.items():
            if within.get(key) is not None and within[key] != value:
                values = f"{value!r}, and {within[key]!r} in custom_params"
                raise RequestError(f"contradicting values of {key}: {values}")
        custom_params = {**within, **said}
    check_marks(custom_params)
    return custom_params


def check_marks(custom_params: object) -> None:
    """Check all marks of a request; without any it is online. A null says nothing.

    Raises:
        RequestError: a mark is unknown, is one that only the server may set, or has a bad
            value, or an offline request has a target.
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
                f"{key} is for online requests, and this one is offline: leave it out; the "
                "deadline of offline work is the completion window of its batch"
            )
        if not _is_target(marks[key]):
            raise RequestError(
                f"{key} is {marks[key]!r}: use a number of milliseconds above 0, at most "
                f"{_MOST_MS:.0e}"
            )


def check_targets_act(custom_params: object, config: CoserveConfig) -> None:
    """Check that plans act on the targets that a request brings along, whose marks are checked.

    Raises:
        RequestError: it brings one, and the policy looks at no targets.
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
    """Check the marks of a batch line, which may say that it is offline and nothing else.

    Raises:
        RequestError: it says something else of itself, or in its ``custom_params``.
    """
    for key, value in (*_marks_in(body).items(), *_marks_in(body.get("custom_params")).items()):
        if key != CLASS_KEY:
            raise RequestError(f"{key!r} has no place in a line of a batch: leave it out")
        if value != RequestClass.OFFLINE.value:
            raise RequestError(f"{key} is {value!r}: lines of a batch are offline: leave it out")


def is_offline(req: Any) -> bool:
    """True when SGLang's ``Req`` is offline. Its marks were checked on arrival."""
    custom_params = req.sampling_params.custom_params
    return (
        isinstance(custom_params, dict)
        and custom_params.get(CLASS_KEY) == RequestClass.OFFLINE.value
    )


def targets_of(req: Any) -> tuple[float | None, float | None]:
    """Return the TTFT and TPOT targets that SGLang's ``Req`` brings along, in seconds.

    None stands for the server's target. Its marks were checked on arrival.
    """
    custom_params = req.sampling_params.custom_params
    if not isinstance(custom_params, dict):
        return None, None
    return _seconds(custom_params.get(TTFT_KEY)), _seconds(custom_params.get(TPOT_KEY))


def _marks_in(fields: object) -> dict[str, Any]:
    """Return the marks among ``fields`` that say something, those of the server included."""
    if not isinstance(fields, dict):
        return {}
    return {
        key: value
        for key, value in fields.items()
        if isinstance(key, str)
        and key.startswith((MARK_PREFIX, _INTERNAL_PREFIX))
        and (value is not None or key.startswith(_INTERNAL_PREFIX))
    }


def _is_target(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= _MOST_MS


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
