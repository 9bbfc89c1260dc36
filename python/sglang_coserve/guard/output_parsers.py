"""Bounds how long SGLang's parsers of tool calls and of reasoning may take.

They read a model's output on the event loop, and a text that a client sends to
``/parse_function_call`` and ``/separate_reasoning``. Some of their regular expressions take time
that is exponential in the text, and a stream is read from its beginning with every chunk.

A timer interrupts a parser in the main thread, as Python's ``re`` looks for signals while it
matches. In another thread it would not, and would hold the interpreter: such calls are handed to
the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Final

from sglang_coserve.guard import compat

logger = logging.getLogger(__name__)

MOST_CPU_S: Final = 0.25
"""CPU time of one call. Calls with 60 KB of arguments take up to 10 ms; ``pythonic`` takes longer
than this on one core of an AMD EPYC, and is then not read."""

_TICK_S: Final = 0.01
"""CPU time of the process between two looks at the parser's own."""

_MOST_ROUNDS: Final = 128
"""Calls read from what waits at the end of a stream."""

_COSTLY_S: Final = 0.001
_REST: Final = 4.0
"""A chunk is costly if it takes more than ``_COSTLY_S`` to read. After a costly chunk no such
stream is read for ``_REST`` times as long, so all of them together take a fifth of the loop's time.
"""


class ParsingTooLongError(BaseException):
    """A parser has taken longer than it may. Parsers catch every ``Exception``."""


class _Clock:
    """Interrupts what runs in ``run`` when it has taken too much of the main thread's CPU time."""

    def __init__(self) -> None:
        self._end_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.rest_until_s = 0.0

    def install(self) -> None:
        """Start to bound parsers, on the running event loop, which is the main thread's."""
        self._loop = asyncio.get_running_loop()
        signal.signal(signal.SIGVTALRM, self._on_tick)

    def bounded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns.

        Raises:
            ParsingTooLongError: it has taken longer than ``MOST_CPU_S``.
        """
        if self._loop is None:
            return function(*arguments)
        if threading.current_thread() is not threading.main_thread():
            return self._on_loop(function, *arguments)
        if self._end_s is not None:  # A parser's method calls another one.
            return function(*arguments)
        self._end_s = time.thread_time() + MOST_CPU_S
        signal.setitimer(signal.ITIMER_VIRTUAL, _TICK_S, _TICK_S)
        try:
            return _run(function, *arguments)
        finally:
            self._end_s = None
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _on_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(self.bounded(function, *arguments))
            except (Exception, ParsingTooLongError) as error:
                answer.set_exception(error)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        return answer.result()

    def _on_tick(self, _signal: int, frame: Any) -> None:
        end_s = self._end_s
        if end_s is None or time.thread_time() < end_s:
            return
        while frame is not None and frame.f_code is not _run.__code__:
            if frame.f_globals.get("__name__") == "logging":
                return  # It may hold a lock: the next tick is soon.
            frame = frame.f_back
        if frame is not None:
            raise ParsingTooLongError


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns: only what this calls is interrupted."""
    return function(*arguments)


_CLOCK: Final = _Clock()


_Pair = tuple[str, list[Any]]
"""Text that is no call, and calls."""


@dataclass(slots=True)
class _Reading:
    """How far a stream has been read."""

    unread: str = ""
    is_costly: bool = False
    is_given_up: bool = False
    is_ending: bool = False


_READING: Final = "_coserve_reading"


def install_parser_bounds() -> None:
    """Bound SGLang's parsers in this process, whose event loop runs in the main thread."""
    from sglang.srt.function_call.core_types import StreamingParseResult
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.json_array_parser import JsonArrayParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    def result_of(text: str, calls: list[Any]) -> Any:
        return StreamingParseResult(normal_text=text, calls=calls)

    def pair_of(result: Any) -> _Pair:
        return result.normal_text, result.calls

    def pair(text: str, calls: list[Any]) -> _Pair:
        return text, calls

    _CLOCK.install()
    _bound(FunctionCallParser, "has_tool_call", lambda _text: False)
    _bound(FunctionCallParser, "parse_non_stream", lambda text: (text, []))
    _bound_stream(FunctionCallParser, "parse_stream_chunk", tuple, pair)
    _bound_stream(JsonArrayParser, "parse_streaming_increment", pair_of, result_of)
    _bound(ReasoningParser, "parse_non_stream", lambda text: ("", text))
    _bound(ReasoningParser, "parse_non_stream_blocks", lambda text: [dict(_TEXT, text=text)])
    _bound(ReasoningParser, "parse_stream_chunk", lambda text: ("", text))


_TEXT: Final = {"type": "text"}


def _bound(owner: type, name: str, as_text: Callable[[str], Any]) -> None:
    """Let a method that reads a text return ``as_text(text)`` when it takes too long."""
    method = getattr(owner, name)

    @wraps(method)
    def bounded(self: Any, text: str, **options: Any) -> Any:
        try:
            return _CLOCK.bounded(partial(method, self, text, **options))
        except ParsingTooLongError:
            _warn(owner, text)
            return as_text(text)

    setattr(owner, name, bounded)


def _warn(owner: type, text: str) -> None:
    logger.warning(
        "%s took longer than %s s for %d characters, which are answered as text",
        *(owner.__name__, MOST_CPU_S, len(text)),
    )


def _bound_stream(
    owner: type,
    chunk_name: str,
    pair_of: Callable[[Any], _Pair],
    result_of: Callable[[str, list[Any]], Any],
) -> None:
    """Bound a method that reads a chunk of a stream, each call and all calls together.

    Text that waits to be read is read at the end of the stream. Chunks of a parser that is not
    told of the end do not wait.
    """
    read, end = getattr(owner, chunk_name), compat.end_of_stream(owner)

    def reading_of(self: Any) -> _Reading:
        reading: _Reading = self.__dict__.setdefault(_READING, _Reading())
        return reading

    @wraps(read)
    def read_chunk(self: Any, text: str, *tools: Any) -> Any:
        reading = reading_of(self)
        if reading.is_given_up:
            return result_of(text, [])
        text, reading.unread = reading.unread + text, ""
        may_wait = reading.is_costly and end is not None and not reading.is_ending
        if may_wait and time.monotonic() < _CLOCK.rest_until_s:
            reading.unread = text
            return result_of("", [])
        begin_s = time.thread_time()
        try:
            result = _CLOCK.bounded(read, self, text, *tools)
        except ParsingTooLongError:
            reading.is_given_up = True
            known = getattr(getattr(self, "detector", self), "_buffer", "")
            text = known if known.endswith(text) else known + text
            _warn(owner, text)
            result = result_of(text, [])
        took_s = time.thread_time() - begin_s
        reading.is_costly = took_s > _COSTLY_S
        if reading.is_costly:
            _CLOCK.rest_until_s = time.monotonic() + _REST * took_s
        return result

    def read_end(self: Any, *tools: Any) -> Any:
        reading = reading_of(self)
        reading.is_ending = True
        text, calls = "", list[Any]()
        # A chunk with several calls is read call by call.
        is_unread = bool(reading.unread)
        for _ in range(_MOST_ROUNDS if is_unread else 0):
            more_text, more_calls = pair_of(read_chunk(self, "", *tools))
            text, calls = text + (more_text or ""), [*calls, *more_calls]
            if not more_calls:
                break
        if not reading.is_given_up:
            with suppress(ParsingTooLongError):
                more_text, more_calls = pair_of(_CLOCK.bounded(end, self, *tools))
                text, calls = text + (more_text or ""), [*calls, *more_calls]
        return result_of(text, calls)

    setattr(owner, chunk_name, read_chunk)
    if end is not None:
        compat.replace_end_of_stream(owner, wraps(end)(read_end))
