"""SGLang's tokenizer manager and chat handler, with large prompts processed in threads.

SGLang renders and tokenizes prompts on the event loop. Short ones still are, because a thread
would cost more than it saves. Since 0.5.22 it converts requests with ``loop.run_in_executor``: in
a worker thread, which has no event loop, a stand-in runs the function at once.

Of a long text a beginning is tokenized, then a longer one, until it has more than twice as many
tokens as the model takes; twice, because tokens at the cut are not those of the whole text.
Tokenization releases the interpreter lock, but converting the tokens to a list holds it: 0.1 s for
a million of them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_coserve.guard.bodies import body_bytes, max_tokens

_CHARS_PER_TOKEN: Final = 4
"""Texts with at most this many characters per token of the context are tokenized as a whole.
English prose has about as many characters per token."""


class PromptLimit:
    """Checks texts against the longest prompt that a model takes."""

    def __init__(self, tokenizer: Any, max_tokens: int, *, truncates: bool) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._truncates = truncates

    def fit(self, text: str) -> str:
        """Return ``text``; or a beginning of it, if it is too long and the server truncates.

        For ordinary texts the time is proportional to the context length, not to the text.

        Raises:
            ValueError: the text is too long.
        """
        num_chars = _CHARS_PER_TOKEN * self._max_tokens
        while num_chars < len(text):
            beginning = text[:num_chars]
            if self._count(beginning) > 2 * self._max_tokens:
                if self._truncates:
                    return beginning
                raise ValueError(
                    f"The input of {len(text):,} characters is longer than the {self._max_tokens:,}"
                    " tokens that this server takes."
                )
            num_chars *= 2
        return text

    def _count(self, text: str) -> int:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return len(self._tokenizer.encode(text))
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding)


class BoundedManager:
    """A proxy of SGLang's tokenizer manager whose tokenizer refuses texts that are too long.

    For the chat handlers, which tokenize prompts themselves.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.tokenizer = _BoundedTokenizer(inner.tokenizer, prompt_limit(inner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _BoundedTokenizer:
    def __init__(self, inner: Any, limit: PromptLimit) -> None:
        self._inner = inner
        self._limit = limit
        self.refusal: ValueError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        """Tokenize ``text``; raises ValueError if it is too long."""
        if isinstance(text, str):
            try:
                text = self._limit.fit(text)
            except ValueError as error:
                self.refusal = error
                raise
        return self._inner.encode(text, *args, **kwargs)


def prompt_limit(manager: Any) -> PromptLimit:
    """Return the limit of the model that a tokenizer manager serves."""
    return PromptLimit(
        manager.tokenizer, max_tokens(manager), truncates=manager.allow_auto_truncate
    )


_T = TypeVar("_T")


class _ThreadLoop:
    """An event loop that runs functions for an executor at once, in the same thread."""

    async def run_in_executor(
        self, _executor: None, function: Callable[..., _T], *arguments: Any
    ) -> _T:
        return function(*arguments)


_LOOP: Final[Any] = _ThreadLoop()


@contextmanager
def thread_loop() -> Iterator[None]:
    """Set the stand-in loop, so that a coroutine that never really waits can run in this thread."""
    asyncio._set_running_loop(_LOOP)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)


_LARGE_CHARS: Final = 8192
"""Texts of this length take 2 to 6 ms to tokenize on one core of an AMD EPYC."""

_CHARS_PER_TEXT: Final = 64
"""Fixed cost of a text in characters: even an empty one takes 20 to 40 us on that machine."""

_MOST_SCORED_CHARS: Final = 32 << 20
"""SGLang prepends the query to every item on the event loop; this many characters take 10 ms."""

_THREADS: Final = 2


class ThreadedTokenizerManager(TokenizerManager):
    """Tokenizes large prompts in threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The threads end with the process.
        self._prompt_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="coserve-prompts")

    async def in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Return ``function(*args)``, called in a thread; ``finished`` runs coroutines so."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prompt_threads, function, *args)

    @property
    def serving_chat_class(self) -> type[OpenAIServingChat]:
        """See ``TokenizerManager``."""
        return ThreadedChat

    def _should_use_batch_tokenization(self, batch_size: int, requests: Any) -> bool:
        """Return True for several texts, so that all are tokenized before the first is sent.

        Otherwise SGLang may send each before the next is tokenized. While a thread does that, an
        answer may arrive that nobody waits for yet, and the whole request fails.
        """
        if super()._should_use_batch_tokenization(batch_size, requests):
            return True
        return batch_size > 0 and all(map(_is_text, (requests[i] for i in range(batch_size))))

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        if self.tokenizer is None or _num_chars(texts) < _LARGE_CHARS:
            return await super()._tokenize_texts(texts, is_cross_encoder)
        fit = prompt_limit(self).fit
        if isinstance(texts, str):
            texts = await self.in_thread(fit, texts)
        elif not is_cross_encoder:
            texts = [await self.in_thread(fit, text) for text in texts]
        tokenize = super()._tokenize_texts
        if self.async_dynamic_batch_tokenizer is not None and isinstance(texts, str):
            return await tokenize(texts, is_cross_encoder)  # It has its own thread.
        return await self.in_thread(finished, tokenize, texts, is_cross_encoder)

    async def score_request(
        self, query: Any = None, items: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """See ``TokenizerManager``.

        Raises:
            ValueError: the prompts of all items together are too long, or a value is invalid.
        """
        if isinstance(query, str) and isinstance(items, list):
            num_chars = len(items) * len(query) + _num_chars(filter(_has_chars, items))
            if num_chars > _MOST_SCORED_CHARS:
                raise ValueError(
                    f"The query before each of {len(items):,} items makes {num_chars:,} characters;"
                    f" one request may have {_MOST_SCORED_CHARS:,}: send fewer items at once."
                )
        return await super().score_request(query, items, *args, **kwargs)


class ThreadedChat(OpenAIServingChat):
    """Renders and tokenizes large chats in threads."""

    async def handle_request(self, request: Any, raw_request: Any) -> Any:
        """See ``OpenAIServingBase``."""
        handler = await self.converting(request, raw_request)
        return await OpenAIServingChat.handle_request(handler, request, raw_request)

    async def converting(self, request: Any, raw_request: Any) -> OpenAIServingChat:
        """Return a handler for this request only, with the converted request cached.

        For a small request it is the usual handler, which converts on the event loop.
        """
        if not is_large(raw_request):
            return self
        converted = await self.tokenizer_manager.in_thread(self._convert, request, raw_request)
        handler = copy.copy(self)
        handler._convert_to_internal_request = lambda *_: converted()
        return handler

    def _convert(self, request: Any, raw_request: Any) -> Callable[[], Any]:
        """Convert a request; return a function that returns the result or raises the error."""
        handler = copy.copy(self)
        handler.tokenizer_manager = BoundedManager(self.tokenizer_manager)
        try:
            result = handler._convert_to_internal_request(request, raw_request)
        except Exception as error:
            return _raising(error)
        return lambda: result


def is_large(raw_request: Any) -> bool:
    """Return whether a request is so large that it must be rendered in a thread."""
    return raw_request is not None and body_bytes(raw_request.scope) >= _LARGE_CHARS


def finished(function: Callable[..., Coroutine[Any, Any, _T]], *args: Any) -> _T:
    """Return the result of a coroutine function that never really waits, in a worker thread.

    Raises:
        RuntimeError: the coroutine waits for something.
    """
    coroutine = function(*args)
    try:
        with thread_loop():
            coroutine.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something")


def _raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def _is_text(request: Any) -> bool:
    has_ids = request.input_ids is not None or getattr(request, "input_embeds", None) is not None
    return isinstance(request.text, str) and not has_ids and not request.contains_mm_input()


def _has_chars(text: Any) -> bool:
    return isinstance(text, str)


def _num_chars(texts: str | Iterable[Any]) -> int:
    """Return the cost of tokenizing texts, in characters."""
    if isinstance(texts, str):
        return len(texts) + _CHARS_PER_TEXT
    return sum(map(_num_chars, texts))
