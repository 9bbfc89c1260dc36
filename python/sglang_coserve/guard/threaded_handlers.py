"""Variants of SGLang's handlers that render and tokenize large requests in threads.

For completions the tokenizer manager does so, for chats ``ThreadedChat``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.entrypoints.openai.serving_tokenize import (
    OpenAIServingDetokenize,
    OpenAIServingTokenize,
)

from sglang_coserve.guard.prompts import BoundedManager, finished, is_large, prompt_limit


def replace_handlers(state: Any) -> None:
    """Replace SGLang's handlers by ours in the state of its app, which has created them."""
    for name, handler_class in (
        ("openai_serving_tokenize", _Tokenize),
        ("openai_serving_detokenize", _Detokenize),
        ("anthropic_serving", _Messages),
        ("ollama_serving", _Ollama),
        ("openai_serving_responses", _responses_class()),
    ):
        handler = getattr(state, name, None)  # The one for responses may have failed to start.
        if handler is not None and handler_class is not None:
            setattr(state, name, _as(handler_class, handler))


def _as(handler_class: Any, handler: Any) -> Any:
    """Return an instance of a subclass with the state of an existing handler."""
    ours = handler_class.__new__(handler_class)
    vars(ours).update(vars(handler))
    return ours


def _bounded(handler: Any) -> Any:
    """Return a copy for one request whose tokenizer refuses texts that are too long."""
    handler = copy.copy(handler)
    handler.tokenizer_manager = BoundedManager(handler.tokenizer_manager)
    return handler


class _Tokenize(OpenAIServingTokenize):
    async def handle_request(self, request: Any, raw_request: Any) -> Any:
        """See ``OpenAIServingBase``."""
        if not is_large(raw_request):
            return await super().handle_request(request, raw_request)
        handler = _bounded(self)
        if handler.chat_serving is not None:
            handler.chat_serving = _bounded(handler.chat_serving)
        answer = partial(OpenAIServingTokenize.handle_request, handler)
        return await self.tokenizer_manager.in_thread(finished, answer, request, raw_request)


class _Detokenize(OpenAIServingDetokenize):
    async def handle_request(self, request: Any, raw_request: Any) -> Any:
        """See ``OpenAIServingBase``."""
        answer = super().handle_request
        if not is_large(raw_request):
            return await answer(request, raw_request)
        return await self.tokenizer_manager.in_thread(finished, answer, request, raw_request)


class _Messages(AnthropicServing):
    async def _handle_non_streaming(self, *request: Any) -> Any:
        return await self._handle(AnthropicServing._handle_non_streaming, *request)

    async def _handle_streaming(self, *request: Any) -> Any:
        return await self._handle(AnthropicServing._handle_streaming, *request)

    async def _handle(
        self, handle: Any, chat_request: Any, anthropic_request: Any, raw_request: Any
    ) -> Any:
        try:
            handler = await self._converting(chat_request, raw_request)
        except ValueError as error:
            return self._refusal(error)
        return await handle(handler, chat_request, anthropic_request, raw_request)

    async def handle_count_tokens(self, request: Any, raw_request: Any) -> Any:
        """See ``AnthropicServing``."""
        if not is_large(raw_request):
            return await super().handle_count_tokens(request, raw_request)
        chat = _bounded(self.openai_serving_chat)
        count = partial(AnthropicServing.handle_count_tokens, self._with_chat(chat))
        manager = self.openai_serving_chat.tokenizer_manager
        response = await manager.in_thread(finished, count, request, raw_request)
        refusal = chat.tokenizer_manager.tokenizer.refusal
        return response if refusal is None else self._refusal(refusal)

    async def _converting(self, chat_request: Any, raw_request: Any) -> AnthropicServing:
        chat = self.openai_serving_chat
        if not is_large(raw_request) or chat._validate_request(chat_request):
            return self
        chat = await chat.converting(chat_request, raw_request)
        chat._convert_to_internal_request(chat_request, raw_request)  # Raises its errors here.
        return self._with_chat(chat)

    def _with_chat(self, chat: Any) -> AnthropicServing:
        handler = copy.copy(self)
        handler.openai_serving_chat = chat
        return handler

    def _refusal(self, error: ValueError) -> Any:
        return self._error_response(
            status_code=400, error_type="invalid_request_error", message=str(error)
        )


class _Ollama(OllamaServing):
    """Also answers an invalid request with 400, which SGLang's handler does not."""

    async def handle_chat(self, request: Any, raw_request: Any) -> Any:
        """See ``OllamaServing``.

        Raises:
            HTTPException: the request is invalid.
        """
        manager = self.tokenizer_manager
        with _as_bad_request():
            if is_large(raw_request):
                prompt_ids = await manager.in_thread(self._render, request.messages)
            else:
                prompt_ids = self._render(request.messages)
            # Reuse the rendered prompt: SGLang's own rendering expects an older transformers.
            tokenizer = _Replaced(
                manager.tokenizer, apply_chat_template=lambda *_, **__: prompt_ids
            )
            handler = copy.copy(self)
            handler.tokenizer_manager = _Replaced(manager, tokenizer=tokenizer)
            return await OllamaServing.handle_chat(handler, request, raw_request)

    async def handle_generate(self, request: Any, raw_request: Any) -> Any:
        """See ``OllamaServing``.

        Raises:
            HTTPException: the request is invalid.
        """
        with _as_bad_request():
            return await super().handle_generate(request, raw_request)

    def _render(self, messages: Sequence[Any]) -> Any:
        limit = prompt_limit(self.tokenizer_manager)
        chat = [{"role": each.role, "content": limit.fit(each.content)} for each in messages]
        return self.tokenizer_manager.tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=False
        )


@contextmanager
def _as_bad_request() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


class _Replaced:
    """A proxy of an object with some attributes replaced."""

    def __init__(self, inner: Any, **attributes: Any) -> None:
        self._inner = inner
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _responses_class() -> type | None:
    """Return our handler class for responses; None if SGLang's cannot be imported."""
    try:
        # It needs packages that SGLang does not require otherwise.
        from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    except ImportError:
        return None

    class Responses(OpenAIServingResponses):
        async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
            """See ``OpenAIServingResponses``."""
            handler = self
            # A previous response may add a long conversation to a small body.
            if is_large(raw_request) or request.previous_response_id:
                handler = copy.copy(self)
                handler._make_request = self._make_in_thread
            return await OpenAIServingResponses.create_responses(handler, request, raw_request)

        async def _make_in_thread(self, *args: Any, **kwargs: Any) -> Any:
            make = partial(OpenAIServingResponses._make_request, _bounded(self), **kwargs)
            return await self.tokenizer_manager.in_thread(finished, make, *args)

    return Responses
