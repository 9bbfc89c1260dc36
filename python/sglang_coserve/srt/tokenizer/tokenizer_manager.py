"""SGLang's tokenizer manager, which all requests pass on their way to the scheduler.

Client data is checked here, and only then are the server's own marks
added.  SGLang builds its message to the scheduler without checking the
types of the client's values, and the scheduler process dies of a message that it cannot
decode; so each message is decoded here once, as the scheduler would.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from asgi_correlation_id import correlation_id
from sglang.srt.managers.io_struct import GenerateReqInput, msgpack_encode
from sglang.srt.managers.utils import msgpack_decode_explained

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.engine_limits import check_request, check_values
from sglang_coserve.guard.grammar_process import GrammarSettings
from sglang_coserve.guard.grammars import GrammarTrials
from sglang_coserve.guard.media_sources import MediaSources
from sglang_coserve.guard.seeds import give_each_choice_its_seed
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.loaded_model import loaded_fingerprint
from sglang_coserve.srt.compat.requests import can_continue
from sglang_coserve.srt.marks.offline_marks import attach_marks, go_on_after
from sglang_coserve.srt.marks.request_marks import is_offline, with_client_marks
from sglang_coserve.srt.monitoring.otel_metrics import (
    metrics_if_configured,
    note_operation,
    operation,
    tier_attributes,
)
from sglang_coserve.srt.scheduler.scheduler import config_of
from sglang_coserve.srt.tokenizer.client_presence import (
    ClientDepartures,
    OutputDelay,
    install_arrival_times,
    key_of,
)
from sglang_coserve.srt.tokenizer.updating_manager import UpdatingTokenizerManager

__all__ = ["CoserveTokenizerManager"]

_MALFORMED: Final = (
    *(AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError),
)
"""Exceptions that SGLang raises on fields of unexpected types and lengths."""

_PICKLED: Final = ("mm_inputs", "mm_data_mooncake", "time_stats")
_HEALTH_PATHS: Final = ("/health", "/health_generate")

_PROMPTS_AT_ONCE: Final = 64
"""Prompts processed before other tasks get a turn; they take 3 ms on one core of an AMD EPYC."""

logger = logging.getLogger(__name__)


class CoserveTokenizerManager(UpdatingTokenizerManager):
    """Refuses requests that would harm the engine, fetches media, and measures the output delay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.coserve_output_delay: OutputDelay = install_arrival_times()
        self._media = MediaSources.named(config_of(self.server_args).media_sources)
        self._departures = ClientDepartures(self.abort_request, self._output_of)
        self._fingerprint: asyncio.Task[str] | None = None
        self._grammar_trials: GrammarTrials | None = None
        settings = compat.settings_of(self.server_args)
        self._otel_metrics = metrics_if_configured(
            settings.served_model_name, self.server_args.host, self.server_args.port
        )
        if settings.grammar_backend == "xgrammar" and self.tokenizer is not None:
            settings = GrammarSettings(
                self.tokenizer,
                self.model_config.vocab_size,
                self.model_config.hf_eos_token_id,
                any_whitespace=not settings.constrained_json_disable_any_whitespace,
            )
            self._grammar_trials = GrammarTrials(settings)

    async def coserve_fingerprint(self) -> str:
        """Return the fingerprint of the model that was loaded, read when it is first asked for."""
        if self._fingerprint is None:
            settings = compat.settings_of(self.server_args)
            # In a thread: it reads parts of all weights.
            reading = asyncio.to_thread(loaded_fingerprint, settings)
            self._fingerprint = asyncio.create_task(reading)
        return await asyncio.shield(self._fingerprint)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Serve a request ``obj`` of SGLang's and yield its outputs.

        Raises:
            ValueError: the request is invalid; SGLang's entry points answer it with 400.
        """
        path = getattr(getattr(request, "url", None), "path", None)
        if path is not None:  # Lines of batches come without HTTP.
            note_operation(path)
        has_answered = False
        try:
            check_request(obj, is_health_check=path in _HEALTH_PATHS)
            client = None if getattr(obj, "background", False) else request
            async with (
                self._departures.watched(client, self._key_of(obj, client)),
                aclosing(super().generate_request(obj, request)) as outputs,
            ):
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

    def _key_of(self, obj: Any, request: Any) -> str | None:
        """Return what names a request that can go on after its tokens; None for any other."""
        headers = getattr(request, "headers", None)
        key = key_of(headers) if headers is not None else None
        if key is None or not isinstance(obj, GenerateReqInput):
            return None
        return key if can_continue(obj, self.preferred_sampling_params) else None

    def _output_of(self, rid: str) -> Sequence[int] | None:
        state = self.rid_to_state.get(rid)
        return None if state is None else state.output_ids

    def _send_one_request(self, tokenized_obj: Any) -> Any:
        self._departures.sending(tokenized_obj.rid)
        if self.is_generation:
            give_each_choice_its_seed(tokenized_obj)
        return super()._send_one_request(tokenized_obj)

    def _send_batch_request(self, tokenized_objs: Any) -> Any:
        for tokenized in tokenized_objs:
            self._departures.sending(tokenized.rid)
        return super()._send_batch_request(tokenized_objs)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        times = self.coserve_output_delay.without_token(recv_obj.rids, self.rid_to_state)
        ending = [] if self._otel_metrics is None else self._ending(recv_obj)
        await super()._handle_batch_output(recv_obj)
        self.coserve_output_delay.observe(times, recv_obj.time_stats)
        for stats, output_tokens, error in ending:
            assert self._otel_metrics is not None
            self._otel_metrics.finished(stats, output_tokens, stats.attributes, error)

    def _ending(self, recv_obj: Any) -> list[tuple[Any, int, str | None]]:
        """Return times, output tokens and error of the requests that end with these outputs."""
        ending = []
        for index, (rid, reason) in enumerate(
            zip(recv_obj.rids, recv_obj.finished_reasons, strict=True)
        ):
            if reason is not None and rid in self.rid_to_state:
                tokens = getattr(recv_obj, "completion_tokens", None)
                error = (
                    str(reason.get("err_type") or "abort") if reason["type"] == "abort" else None
                )
                stats = self.rid_to_state[rid].time_stats
                ending.append((stats, tokens[index] if tokens else 0, error))
        return ending

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

    def _create_tokenized_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        given = obj.sampling_params.get("custom_params")
        custom_params = with_client_marks(given, config_of(self.server_args))
        tokenized = _as_the_scheduler_reads(super()._create_tokenized_object(obj, *args, **kwargs))
        check_values(tokenized, self.model_config.vocab_size, obj.input_ids)
        tokenized.sampling_params.custom_params = custom_params
        attach_marks(tokenized.sampling_params)
        if is_offline(tokenized):
            generated = self._departures.generated_before(tokenized, self.coserve_weights.name)
            if generated:
                logger.info("request %s goes on after %d tokens", tokenized.rid, len(generated))
                go_on_after(tokenized.sampling_params, generated)
        self._describe(tokenized)
        return tokenized

    def _describe(self, tokenized: Any) -> None:
        """Say in metrics and spans which tier a request has, and in spans its ``x-request-id``."""
        state = self.rid_to_state.get(tokenized.rid)
        if state is None:
            return
        tiers = tier_attributes(tokenized.sampling_params.custom_params)
        state.time_stats.attributes = tiers | {"gen_ai.operation.name": operation()}
        if state.time_stats.trace_ctx.tracing_enable:
            request_id = correlation_id.get()
            named = {"http.request.header.x-request-id": [request_id]} if request_id else {}
            state.time_stats.trace_ctx.trace_set_root_attrs(tiers | named)


class _From:
    """A view of the prompts of a request from the index ``first`` on."""

    def __init__(self, request: Any, first: int) -> None:
        self._request = request
        self._first = first

    def __getitem__(self, index: int) -> Any:
        return self._request[self._first + index]


def _as_the_scheduler_reads(tokenized: Any) -> Any:
    """Return the message decoded as the scheduler would. O(its size).

    Fields that SGLang pickles are kept as they are, and so are ``custom_params``, which
    may be any JSON object.

    Raises:
        ValueError: a field has another type; the message names it.
    """
    params = tokenized.sampling_params
    kept = {name: getattr(tokenized, name) for name in _PICKLED if hasattr(tokenized, name)}
    custom_params = params.custom_params
    if not isinstance(custom_params, dict | None):
        raise ValueError("custom_params: use an object, with names and values")
    message = msgspec.structs.replace(
        tokenized,
        sampling_params=msgspec.structs.replace(params, custom_params=None),
        **dict.fromkeys(kept),
    )
    try:
        read = msgpack_decode_explained(msgpack_encode(message))
    except (ValueError, *_MALFORMED) as error:
        field = _unreadable_field(message.sampling_params) or _unreadable_field(message)
        raise ValueError(f"{field or 'malformed request'}: {error}") from error
    for name, value in kept.items():
        setattr(read, name, value)
    read.sampling_params.custom_params = custom_params
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
