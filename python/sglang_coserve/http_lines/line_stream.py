"""The attempts that one connection asks for, in calls that are no larger than they may be."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec.structs import replace
from starlette.types import Message, Receive, Send

from sglang_coserve.errors import RequestError
from sglang_coserve.http_lines.messages import (
    GATHER_S,
    HEARTBEAT,
    HEARTBEAT_S,
    LineCall,
    LineEvent,
    call_id,
    decode_message,
    encode_message,
)
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyMeter, BodyTooLargeError
from sglang_coserve.lines.backend import Backend, LineMovedError, LineRequest, LineResult

_HEAD_BYTES: Final = 64
"""Of a call that is too large: its id is in them."""


class BadCallError(RequestError):
    """A call that cannot be read."""

    def __init__(self, message: str, call: int | None, *, is_too_large: bool = False) -> None:
        super().__init__(message)
        self.call = call
        """Its id; None where even that is unknown."""

        self.is_too_large = is_too_large


class CallReader:
    """Calls as JSON lines, in pieces of any size. Keeps at most one call that is within
    ``limits``."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._begin()

    def _begin(self) -> None:
        self._meter = BodyMeter(self._limits)
        self._parts: list[bytes] = []
        self._fault: BodyTooLargeError | None = None

    def feed(self, content: bytes) -> Iterator[LineCall | BadCallError]:
        """Yield what ends in ``content``, in order."""
        *ends, rest = content.split(b"\n")
        for end in ends:
            self._take(end)
            call = self._call()
            self._begin()
            if call is not None:
                yield call
        self._take(rest)

    def _take(self, part: bytes) -> None:
        if self._fault is not None or not part:
            return
        self._parts.append(part)
        try:
            self._meter.take(part)
        except BodyTooLargeError as error:
            self._fault = error
            self._parts = [b"".join(self._parts)[:_HEAD_BYTES]]

    def _call(self) -> LineCall | BadCallError | None:
        content = b"".join(self._parts)
        if self._fault is not None:
            return BadCallError(str(self._fault), call_id(content), is_too_large=True)
        if not content:
            return None
        try:
            return decode_message(content, LineCall)
        except RequestError as error:
            return BadCallError(str(error), call_id(content))


_GIVEN_UP: Final = "the engine has given the line up"
_ASKED_BACK: Final = "it was asked for"
_HAND_BACK_S: Final = 30.0
"""Longest wait for an attempt that the engine said it would hand back. It has bounds of its own,
and keeps them unless it hangs."""

_HEADERS: Final = [(b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no")]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _RunningAttempt:
    request: LineRequest
    task: asyncio.Task[LineResult]
    moved: str | None = None
    """Why the engine ended it."""

    prompt_tokens: int | None = None
    is_wanted: bool = True


@dataclass(slots=True)
class _UnsentTokens:
    """What an attempt has generated that was not sent yet."""

    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    """How long its prompt is; 0 if that was sent before, or is not known."""


class LineStream:
    """Serves what is asked for on one connection, until that or the stream ends.

    Calls come in and events go out at the same time, those together that come soon after each
    other.
    """

    def __init__(
        self,
        backend: Backend,
        refusal: Callable[[LineRequest], str | None],
        limits: BodyLimits,
    ) -> None:
        """``refusal`` says why an attempt is not made now, ``limits`` what one call may be."""
        self._backend = backend
        self._refusal = refusal
        self._reader = CallReader(limits)
        self._attempts: dict[int, _RunningAttempt] = {}
        self._tokens: dict[int, _UnsentTokens] = {}
        self._ends: list[bytes] = []
        self._changed = asyncio.Event()
        self._is_gone = False
        """Nobody listens any more."""

        self._is_last = False
        """No more calls are taken: the stream ends with its last attempt."""

        self._fault: str | None = None

    @property
    def num_in_flight(self) -> int:
        """Attempts that are being made."""
        return len(self._attempts)

    def take_out(self, why: str) -> None:
        """End every attempt: the lines go on elsewhere."""
        for attempt in self._attempts.values():
            self._hand_back(attempt, why)

    def _hand_back(self, attempt: _RunningAttempt, why: str) -> None:
        if attempt.moved is None:
            attempt.moved = why
            if self._backend.hand_back(attempt.request):
                asyncio.get_running_loop().call_later(_HAND_BACK_S, attempt.task.cancel)
            else:
                attempt.task.cancel()

    def close(self, why: str) -> None:
        """End every attempt, and then the stream."""
        self.take_out(why)
        self._is_last = True
        self._changed.set()

    async def serve(self, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        # A client that expects 100 Continue waits for the first of these.
        first = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        reading = asyncio.create_task(self._read(receive))
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            self._take(first)  # Before it is asked whether this stream is at its end.
            while not self._is_gone:
                if not await self._has_changed():
                    await send(_part(HEARTBEAT))
                    continue
                # Calls may come for longer than the other side bears silence.
                await send(_part(self._content() or HEARTBEAT))
                if reading.done():
                    reading.result()  # Deaf to what is asked for: the connection ends.
                if self._fault is not None or self._has_ended:
                    await send({"type": "http.response.body"})
                    return
                await asyncio.sleep(GATHER_S)
        finally:
            reading.cancel()
            for attempt in self._attempts.values():
                attempt.is_wanted = False
                attempt.task.cancel()
            await asyncio.wait({reading, *(each.task for each in self._attempts.values())})

    @property
    def _has_ended(self) -> bool:
        return self._is_last and not (self._attempts or self._ends)

    async def _has_changed(self) -> bool:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def _content(self) -> bytes:
        """Return what there is to send."""
        tokens = (
            LineEvent(of, tuple(new.token_ids), new.prompt_tokens)
            for of, new in self._tokens.items()
        )
        content = [*map(encode_message, tokens), *self._ends]
        if self._fault is not None:
            content.append(encode_message(LineEvent(fault=self._fault)))
        self._tokens.clear()
        self._ends.clear()
        return b"".join(content)

    async def _read(self, receive: Receive) -> None:
        while not self._is_gone:
            self._take(await receive())

    def _take(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._is_gone = True
        elif self._fault is None:
            is_last = not message.get("more_body", False)
            content = message.get("body", b"")
            for call in self._reader.feed(content + b"\n" if is_last else content):
                self._handle(call)
            self._is_last |= is_last
        self._changed.set()

    def _handle(self, call: LineCall | BadCallError) -> None:
        if isinstance(call, BadCallError):
            self._refuse(call)
        elif call.attempt is not None:
            self._begin(call.id, call.attempt)
        elif (attempt := self._attempts.get(call.id)) is None:
            return  # It has ended meanwhile.
        elif call.is_wanted:
            self._hand_back(attempt, _ASKED_BACK)
        else:
            attempt.is_wanted = False
            attempt.task.cancel()

    def _refuse(self, bad: BadCallError) -> None:
        if bad.call is None:
            self._fault = str(bad)
            return
        result = LineResult.refused(413 if bad.is_too_large else 400, str(bad))
        self._ends.append(encode_message(LineEvent(bad.call, result=result)))

    def _begin(self, number: int, attempt: LineRequest) -> None:
        if number in self._attempts:
            self._fault = f"the id {number} is in use: each attempt needs its own"
        elif (why := self._refusal(attempt)) is not None:
            self._ends.append(encode_message(LineEvent(number, moved=why)))
        else:
            request = attempt.from_wire(time.time())
            on_tokens = partial(self._add_tokens, number)
            task = asyncio.ensure_future(self._backend.run(request, on_tokens))
            self._attempts[number] = _RunningAttempt(request, task)
            # As a callback: a task that is cancelled before it starts runs no code.
            task.add_done_callback(partial(self._end, number))

    def _add_tokens(self, number: int, token_ids: Sequence[int]) -> None:
        unsent = self._tokens.setdefault(number, _UnsentTokens())
        unsent.token_ids.extend(token_ids)
        attempt = self._attempts[number]
        if attempt.prompt_tokens is None:
            attempt.prompt_tokens = self._backend.prompt_tokens(attempt.request)
            unsent.prompt_tokens = attempt.prompt_tokens or 0
        self._changed.set()

    def _end(self, number: int, task: asyncio.Task[LineResult]) -> None:
        attempt = self._attempts.pop(number)
        self._changed.set()
        if not attempt.is_wanted:
            self._tokens.pop(number, None)
            if not task.cancelled():
                task.exception()
            return
        moved = LineEvent(number, moved=attempt.moved or _GIVEN_UP)
        try:
            content = encode_message(LineEvent(number, result=task.result()))
        except asyncio.CancelledError:
            content = encode_message(moved)
        except LineMovedError as error:
            content = encode_message(replace(moved, kv=error.kv))
        except Exception as error:
            line = attempt.request
            _log.exception("line %d of %s failed", line.line, line.batch_id)
            result = LineResult.refused(500, f"the engine failed: {error!r}")
            content = encode_message(LineEvent(number, result=result))
        self._ends.append(content)


def _part(content: bytes) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": True}
