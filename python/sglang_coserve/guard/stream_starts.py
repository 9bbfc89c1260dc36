"""Begins the streams of Ollama's routes before their answers begin.

SGLang starts such an answer, and only then asks the engine, which may find the request invalid.
All its other routes have the error as an event of the stream, or look at the request first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

from starlette.responses import StreamingResponse

_HANDLERS: Final = ("handle_chat", "handle_generate")


def begin_streams_first(state: Any) -> None:
    """Replace the methods of SGLang's handler for Ollama's routes in the state of its app."""
    handler = getattr(state, "ollama_serving", None)
    if handler is not None:
        for method in _HANDLERS:
            setattr(handler, method, partial(_begun, getattr(handler, method)))


async def _begun(handle: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Return a handler's answer; if it is a stream, wait for its first part.

    Raises:
        ValueError: the request is invalid.
    """
    answer = await handle(*args)
    if isinstance(answer, StreamingResponse):
        parts: Any = answer.body_iterator
        try:
            first = [await anext(parts)]
        except StopAsyncIteration:
            first = []
        answer.body_iterator = _from(first, parts)
    return answer


async def _from(first: list[Any], parts: Any) -> AsyncIterator[Any]:
    try:
        for part in first:
            yield part
        async for part in parts:
            yield part
    finally:
        await parts.aclose()
