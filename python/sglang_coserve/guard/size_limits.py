"""How large a body and a prompt may be, told before either is processed.

An ASGI middleware measures bodies from their raw bytes, of which at most the limit is kept, and
answers larger ones with 413.

Of a long text a beginning is tokenized, then a longer one, until it has more than twice as many
tokens as the model takes; twice, because tokens at the cut are not those of the whole text.
Tokenization releases the interpreter lock, but converting the tokens to a list holds it: 0.1 s for
a million of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sglang_coserve.asgi import App, Receive, Scope, Send, is_form, replay, send_error
from sglang_coserve.jsonl.body_limits import BodyLimits, BodyMeter, BodyTooLargeError

__all__ = [
    "BoundedManager",
    "PromptLimit",
    "RequestGateMiddleware",
    "body_bytes",
    "body_limits",
    "prompt_limit",
    "set_body_limits",
]

_CHARS_PER_TOKEN: Final = 4
"""Texts with at most this many characters per token of the context are tokenized as a whole.
English prose has about as many characters per token."""

_BYTES_PER_TOKEN: Final = 16
"""Largest body, in bytes per token of the context, if that is more than 4 MiB: non-ASCII
characters may be escapes of 6 bytes, a few of which make a token."""

_MULTIMODAL_BYTES: Final = 64 << 20
"""Largest body for a multimodal model, as images and sounds are base64 text in the body."""


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
        manager.tokenizer, _max_tokens(manager), truncates=manager.allow_auto_truncate
    )


def body_limits(manager: Any) -> BodyLimits:
    """Return the limits of request bodies for the model of a tokenizer manager."""
    max_tokens, default = _max_tokens(manager), BodyLimits()
    max_bytes = max(default.max_bytes, _BYTES_PER_TOKEN * max_tokens)
    if manager.model_config.is_multimodal:
        max_bytes = max(max_bytes, _MULTIMODAL_BYTES)
    # Room for a prompt of token ids and its other fields.
    max_values = max(default.max_values, max_tokens + default.max_objects)
    context_tokens = int(manager.context_len)
    return replace(
        default, max_bytes=max_bytes, max_values=max_values, context_tokens=context_tokens
    )


def _max_tokens(manager: Any) -> int:
    # The limit of the KV pool is known once the scheduler is running.
    return int(min(manager.context_len, manager.max_req_input_len or manager.context_len))


_FREE_PATHS: Final = frozenset(
    {
        "/update_weights_from_tensor",
        "/load_lora_adapter_from_tensors",
    }
)
"""For operators only."""

_FORM_PATH: Final = "/v1/audio/transcriptions"
"""Takes a form, which is spooled to a file."""

_STATE: Final = "coserve_body_limits"
_SIZE: Final = "coserve_body_bytes"


def set_body_limits(app: Any, limits: BodyLimits) -> None:
    """Set the limits of request bodies for ``app``; until then the defaults apply."""
    setattr(app.state, _STATE, limits)


def body_bytes(scope: Scope) -> int:
    """Return the size of a body that passed the gate; 0 for any other."""
    size_bytes = scope.get(_SIZE, 0)
    return int(size_bytes)


class RequestGateMiddleware:
    """Refuses bodies that are too large; see the module's docstring.

    Args:
        free_prefixes: Of paths whose routes bound by themselves what they read.
    """

    def __init__(self, app: App, *, free_prefixes: tuple[str, ...] = ()) -> None:
        self._app = app
        self._free_prefixes = free_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if not self._is_measured(scope):
            await self._app(scope, receive, send)
            return
        state = getattr(scope.get("app"), "state", None)
        meter = BodyMeter(getattr(state, _STATE, None) or BodyLimits())
        chunks: list[bytes] = []
        is_complete = False
        while not is_complete:
            message = await receive()
            if message["type"] != "http.request":
                return  # The client has disconnected.
            chunks.append(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            try:
                meter.take(chunks[-1])
            except BodyTooLargeError as error:
                await send_error(send, 413, str(error))
                return
        body = b"".join(chunks)
        await self._app({**scope, _SIZE: len(body)}, replay(body, receive), send)

    def _is_measured(self, scope: Scope) -> bool:
        # Whatever its method: some of SGLang's routes parse the body of a GET, too.
        if scope["type"] != "http":
            return False
        path = scope["path"]
        if path in _FREE_PATHS or path.startswith(self._free_prefixes):
            return False
        return path != _FORM_PATH or not is_form(scope)
