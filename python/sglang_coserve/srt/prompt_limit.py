"""Texts that are longer than any prompt of the model, found out from their beginnings.

A text is tokenized without the interpreter lock, but its tokens then become a list
with it: a tenth of a second for a million of them. And tokenizing what is refused in the
end takes time that others could have. So a long text is tokenized from its beginning
until it has twice the tokens that the model takes. Twice, since the tokens at a cut are not
those of the whole text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sglang_coserve.jsonl.body_limits import BodyLimits

__all__ = ["BoundedManager", "PromptLimit", "body_limits", "prompt_limit"]

_CHARS_PER_TOKEN: Final = 4
"""Texts with fewer characters for each token that the model takes are tokenized at once.
Prose in English has about as many."""

_BYTES_PER_TOKEN: Final = 16
"""A body may have so many for each token that the model takes, if that is more than 4 MiB:
characters outside of ASCII may be escapes of 6 bytes, of which few make a token."""

_MULTIMODAL_BYTES: Final = 64 << 20
"""Images and sounds come as text in the body."""


class PromptLimit:
    """The longest prompt that a model takes."""

    def __init__(self, tokenizer: Any, max_tokens: int, *, truncates: bool) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._truncates = truncates

    def fit(self, text: str) -> str:
        """Return ``text``, or a beginning of it where the server truncates what is too long.

        Takes time in proportion to what the model takes, if the text is a usual one.

        Raises:
            ValueError: it is too long.
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
    """SGLang's tokenizer manager for a handler, with a tokenizer that refuses what is too long.

    The handlers of chats tokenize prompts themselves.
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
        """As the tokenizer does, but raises ValueError for a text that is too long."""
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
        manager.tokenizer, _max_tokens(manager), truncates=manager.allow_auto_truncate
    )


def body_limits(manager: Any) -> BodyLimits:
    """Return what one request to a tokenizer manager's model may be."""
    max_tokens, default = _max_tokens(manager), BodyLimits()
    max_bytes = max(default.max_bytes, _BYTES_PER_TOKEN * max_tokens)
    if manager.model_config.is_multimodal:
        max_bytes = max(max_bytes, _MULTIMODAL_BYTES)
    # A prompt of token ids, and what is said of it.
    max_values = max(default.max_values, max_tokens + default.max_objects)
    return replace(default, max_bytes=max_bytes, max_values=max_values)


def _max_tokens(manager: Any) -> int:
    # What the KV pool takes is known once the scheduler is up.
    return int(min(manager.context_len, manager.max_req_input_len or manager.context_len))
