"""Has SGLang's handlers render and tokenize beside the event loop, where SGLang does so on it.

These are messages, responses, and what only tokenizes: chats and completions are left to SGLang. A
coroutine that never really waits needs no event loop: it runs in a worker thread, where a stand-in
runs at once what SGLang leaves to an executor.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from sglang_coserve.guard.bodies import body_bytes
from sglang_coserve.thread_loop import thread_loop

_T = TypeVar("_T")


def finished(function: Callable[..., Coroutine[Any, Any, _T]], *args: Any, **kwargs: Any) -> _T:
    """Return the result of a coroutine function that never really waits, in a worker thread.

    Raises:
        RuntimeError: the coroutine waits for something.
    """
    coroutine = function(*args, **kwargs)
    try:
        with thread_loop():
            coroutine.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something")


LARGE_CHARS: Final = 8192
"""Texts of this length take 2 to 6 ms to tokenize on one core of an AMD EPYC. Shorter ones stay on
the event loop, as a thread would cost more than it saves."""

_WHOLE: Final = (
    ("openai_serving_tokenize", "handle_request"),
    ("openai_serving_detokenize", "handle_request"),
    ("openai_serving_responses", "_make_request"),
    ("anthropic_serving", "handle_count_tokens"),
)
"""Handlers in the state of SGLang's app, each with the method that runs in a thread."""


def replace_handlers(state: Any) -> None:
    """Replace methods of SGLang's handlers in the state of its app, which has created them."""
    for name, method in _WHOLE:
        handler = getattr(state, name, None)  # The one for responses may have failed to start.
        if handler is not None:
            setattr(handler, method, partial(asyncio.to_thread, finished, getattr(handler, method)))
    messages = state.anthropic_serving
    for method in ("_handle_non_streaming", "_handle_streaming"):
        handle = getattr(type(messages), method)
        setattr(messages, method, partial(_converted_first, handle, messages))


async def _converted_first(
    handle: Any, messages: Any, chat_request: Any, anthropic_request: Any, raw_request: Any
) -> Any:
    """Answer a message whose chat is rendered in a thread if it is large."""
    chat = messages.openai_serving_chat
    if body_bytes(raw_request.scope) >= LARGE_CHARS and not chat._validate_request(chat_request):
        convert = partial(chat._convert_to_internal_request, chat_request, raw_request)
        converting = asyncio.create_task(asyncio.to_thread(convert))
        with suppress(Exception):  # It is raised again where the handler asks.
            await converting
        chat, messages = copy.copy(chat), copy.copy(messages)
        chat._convert_to_internal_request = lambda *_: converting.result()
        messages.openai_serving_chat = chat
    return await handle(messages, chat_request, anthropic_request, raw_request)
