"""SGLang's tokenizer manager with the guard's checks: whatever the door, all requests pass it.

SGLang builds its message to the scheduler without checking the types of the client's values, and
the scheduler process dies of a message that it cannot decode; so each message is decoded here once,
as the scheduler would.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any, Final

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import msgpack_encode
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.managers.utils import msgpack_decode_explained

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.bodies import most_text_chars
from sglang_coserve.guard.engine_limits import ModelLimits, check_request, check_values
from sglang_coserve.guard.grammar_process import GrammarSettings
from sglang_coserve.guard.grammars import GrammarTrials
from sglang_coserve.guard.media_sources import MediaSources
from sglang_coserve.guard.sampling import give_each_choice_its_seed
from sglang_coserve.guard.sizes import begin_sizes
from sglang_coserve.guard.text_size import bound_texts
from sglang_coserve.guard.threaded_handlers import LARGE_CHARS, finished

_MALFORMED: Final = (
    *(AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError),
)
"""Exceptions that SGLang raises on fields of unexpected types and lengths."""

_MADE: Final = ("mm_inputs", "mm_data_mooncake", "time_stats")
"""Fields of the message that hold no values of a client's, but tensors and objects of SGLang's."""

_HEALTH_PATHS: Final = ("/health", "/health_generate")

_PROMPTS_AT_ONCE: Final = 64
"""Prompts processed before other tasks get a turn; they take 3 ms on one core of an AMD EPYC."""

_CHARS_PER_TEXT: Final = 64
"""Fixed cost of a text in characters: even an empty one takes 20 to 40 us on that machine."""

_MOST_SCORED_CHARS: Final = 32 << 20
"""SGLang prepends the query to every item on the event loop; this many characters take 10 ms."""

logger = logging.getLogger(__name__)


class GuardedTokenizerManager(TokenizerManager):
    """Refuses requests that would harm the engine, fetches their media, and tokenizes large prompts
    in threads."""

    _media: MediaSources | None = None
    _grammar_trials: GrammarTrials | None = None

    def guard_with(self, settings: Any, media_sources: str) -> None:
        """Fetch media from ``media_sources`` alone (``MediaSources.named``), and try grammars.

        ``settings`` are SGLang's in effect.
        """
        self._media = MediaSources.named(media_sources)
        bound_texts(self.tokenizer, lambda: most_text_chars(self))
        if settings.grammar_backend == "xgrammar" and self.tokenizer is not None:
            of_grammars = GrammarSettings(
                self.tokenizer,
                self.model_config.vocab_size,
                self.model_config.hf_eos_token_id,
                any_whitespace=not settings.constrained_json_disable_any_whitespace,
            )
            self._grammar_trials = GrammarTrials(of_grammars)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Serve a request ``obj`` of SGLang's and yield its outputs.

        Raises:
            ValueError: the request is invalid; SGLang's entry points answer it with 400.
        """
        path = getattr(getattr(request, "url", None), "path", None)
        has_answered = False
        try:
            begin_sizes()
            check_request(
                obj,
                given_by_client=_is_body(request),
                is_health_check=path in _HEALTH_PATHS,
            )
            async with aclosing(self.serve(obj, request)) as outputs:
                async for output in outputs:
                    has_answered = True
                    yield output
        except RequestError as error:
            raise ValueError(str(error)) from error
        except _MALFORMED as error:
            if has_answered:
                raise
            message = f"malformed request: {type(error).__name__}: {error}"
            logger.warning(message)
            logger.debug("where it was malformed", exc_info=True)
            raise ValueError(message) from error

    def serve(self, obj: Any, request: Any) -> Any:
        """Serve a request that was checked; return an async generator of its outputs."""
        return super().generate_request(obj, request)

    def _send_one_request(self, tokenized_obj: Any) -> Any:
        if self.is_generation:
            give_each_choice_its_seed(tokenized_obj)
        return super()._send_one_request(tokenized_obj)

    async def _tokenize_one_request(self, obj: Any) -> Any:
        # Without a multimodal processor SGLang ignores media.
        if self._media is not None and self.mm_processor is not None and obj.contains_mm_input():
            self._validate_mm_limits(obj)
            await self._media.bring(obj)
        tokenized = await super()._tokenize_one_request(obj)
        await self._try_grammar(tokenized)
        return tokenized

    async def _batch_tokenize_and_process(self, batch_size: int, obj: Any) -> Any:
        tokenized: list[Any] = []
        for first in range(0, batch_size, _PROMPTS_AT_ONCE):
            count = min(_PROMPTS_AT_ONCE, batch_size - first)
            part = await super()._batch_tokenize_and_process(count, _From(obj, first))
            for one in part:
                await self._try_grammar(one)
            tokenized += part
            await asyncio.sleep(0)  # Let other tasks run.
        return tokenized

    async def _try_grammar(self, tokenized: Any) -> None:
        if self._grammar_trials is not None and self.is_generation:
            await self._grammar_trials.check(tokenized.sampling_params)

    def _should_use_batch_tokenization(self, batch_size: int, requests: Any) -> bool:
        """Return True for several texts, so that all are tokenized before the first is sent.

        Otherwise SGLang may send each before the next is tokenized. While a thread does that, an
        answer may arrive that nobody waits for yet, and the whole request fails.
        """
        if super()._should_use_batch_tokenization(batch_size, requests):
            return True
        return batch_size > 0 and all(map(_is_text, (requests[i] for i in range(batch_size))))

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        tokenize = super()._tokenize_texts
        has_thread = self.async_dynamic_batch_tokenizer is not None and isinstance(texts, str)
        if self.tokenizer is None or has_thread or _num_chars(texts) < LARGE_CHARS:
            return await tokenize(texts, is_cross_encoder)
        return await asyncio.to_thread(finished, tokenize, texts, is_cross_encoder)

    async def score_request(
        self, query: Any = None, items: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """See ``TokenizerManager``.

        Raises:
            ValueError: the prompts of all items together are too long, or a value is invalid.
        """
        if isinstance(query, str) and isinstance(items, list):
            texts = (item for item in items if isinstance(item, str))
            num_chars = len(items) * len(query) + _num_chars(texts)
            if num_chars > _MOST_SCORED_CHARS:
                raise ValueError(
                    f"The query before each of {len(items):,} items makes {num_chars:,} characters;"
                    f" one request may have {_MOST_SCORED_CHARS:,}: send fewer items at once."
                )
        return await super().score_request(query, items, *args, **kwargs)

    def _create_tokenized_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        tokenized = _as_the_scheduler_reads(super()._create_tokenized_object(obj, *args, **kwargs))
        config = self.model_config
        model = ModelLimits(
            config.vocab_size,
            config.hidden_size,
            int(self.context_len),
            is_multimodal=bool(config.is_multimodal),
        )
        check_values(tokenized, model, obj.input_ids)
        return tokenized


def _is_body(request: Any) -> bool:
    """Return whether a request of SGLang's has the fields of the body that came with ``request``.

    Other routes have types of their own for bodies, and SGLang's handlers make requests from them.
    """
    route = getattr(request, "scope", {}).get("route")
    bodies = getattr(getattr(route, "dependant", None), "body_params", ())
    return any(
        getattr(body.field_info.annotation, "__module__", None) == io_struct.__name__
        for body in bodies
    )


class _From:
    """A view of the prompts of a request from the index ``first`` on."""

    def __init__(self, request: Any, first: int) -> None:
        self._request = request
        self._first = first

    def __getitem__(self, index: int) -> Any:
        return self._request[self._first + index]


def _is_text(request: Any) -> bool:
    has_ids = request.input_ids is not None or getattr(request, "input_embeds", None) is not None
    return isinstance(request.text, str) and not has_ids and not request.contains_mm_input()


def _num_chars(texts: str | Iterable[Any]) -> int:
    """Return the cost of tokenizing texts, in characters."""
    if isinstance(texts, str):
        return len(texts) + _CHARS_PER_TEXT
    return sum(map(_num_chars, texts))


def _as_the_scheduler_reads(tokenized: Any) -> Any:
    """Return the message decoded as the scheduler would. O(its size).

    Fields that SGLang itself makes are kept as they are.

    Raises:
        ValueError: a field has another type; the message names it.
    """
    kept = {name: getattr(tokenized, name) for name in _MADE if hasattr(tokenized, name)}
    message = msgspec.structs.replace(tokenized, **dict.fromkeys(kept))
    try:
        read = msgpack_decode_explained(msgpack_encode(message))
    except (ValueError, *_MALFORMED) as error:
        field = _unreadable_field(message.sampling_params) or _unreadable_field(message)
        raise ValueError(f"{field or 'malformed request'}: {error}") from error
    for name, value in kept.items():
        setattr(read, name, value)
    return read


def _unreadable_field(struct: Any) -> str | None:
    """Return the name of the first field that cannot be decoded with its type."""
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if isinstance(value, msgspec.Struct | array):
            continue
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=field.type)
        except Exception:
            return field.name
    return None
