"""SGLang's tokenizer manager and chat handler, with large prompts taken off the event loop.

SGLang renders and tokenizes a prompt where it serves everybody else. Short ones still are:
they take less time than a thread would cost them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_coserve.batch.worker_threads import WorkerThreads
from sglang_coserve.srt.prompt_limit import BoundedManager, prompt_limit
from sglang_coserve.srt.request_gate import body_bytes

__all__ = ["ThreadedChat", "ThreadedTokenizerManager", "finished"]

_T = TypeVar("_T")

_LARGE_CHARS: Final = 8192
"""Takes 2 to 6 ms to tokenize, on one core of an AMD EPYC."""

_THREADS: Final = 2


class ThreadedTokenizerManager(TokenizerManager):
    """Tokenizes in threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # They end with the process.
        self.coserve_threads = WorkerThreads("coserve-prompts", _THREADS)

    @property
    def serving_chat_class(self) -> type[OpenAIServingChat]:
        """See ``TokenizerManager``."""
        return ThreadedChat

    def _should_use_batch_tokenization(self, batch_size: int, requests: Any) -> bool:
        """Have several texts tokenized before the first one is sent.

        SGLang may send each before the next is tokenized. While a thread does that, an answer
        may come for which nobody waits yet, and the whole request fails.
        """
        if super()._should_use_batch_tokenization(batch_size, requests):
            return True
        return batch_size > 0 and all(map(_is_text, (requests[i] for i in range(batch_size))))

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        if self.tokenizer is None or _num_chars(texts) < _LARGE_CHARS:
            return await super()._tokenize_texts(texts, is_cross_encoder)
        fit = prompt_limit(self).fit
        if isinstance(texts, str):
            texts = await self.coserve_threads.run(fit, texts)
        elif not is_cross_encoder:
            texts = [await self.coserve_threads.run(fit, text) for text in texts]
        tokenizing = super()._tokenize_texts(texts, is_cross_encoder)
        if self.async_dynamic_batch_tokenizer is not None and isinstance(texts, str):
            return await tokenizing  # Has a thread of its own.
        return await self.coserve_threads.run(finished, tokenizing)


class ThreadedChat(OpenAIServingChat):
    """Renders and tokenizes large chats in threads."""

    async def handle_request(self, request: Any, raw_request: Any) -> Any:
        """See ``OpenAIServingBase``."""
        handler = self
        if raw_request is not None and body_bytes(raw_request.scope) >= _LARGE_CHARS:
            threads = self.tokenizer_manager.coserve_threads
            converted = await threads.run(self._convert, request, raw_request)
            handler = copy.copy(self)
            handler._convert_to_internal_request = lambda *_: converted()
        return await OpenAIServingChat.handle_request(handler, request, raw_request)

    def _convert(self, request: Any, raw_request: Any) -> Callable[[], Any]:
        """Convert a request; return what returns, or raises, what came of it."""
        handler = copy.copy(self)
        handler.tokenizer_manager = BoundedManager(self.tokenizer_manager)
        try:
            result = handler._convert_to_internal_request(request, raw_request)
        except Exception as error:
            return _raising(error)
        return lambda: result


def finished(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return what a coroutine returns that waits for nothing."""
    try:
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


def _num_chars(texts: str | Iterable[Any]) -> int:
    return len(texts) if isinstance(texts, str) else sum(map(_num_chars, texts))
