"""SGLang's tokenizer manager, which all requests pass on their way to the scheduler.

The guard checks what clients have sent; only then are the server's own marks added.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from asgi_correlation_id import correlation_id
from sglang.srt.managers.io_struct import GenerateReqInput

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
    install_arrival_times,
    key_of,
)
from sglang_coserve.srt.tokenizer.updating_manager import UpdatingTokenizerManager

logger = logging.getLogger(__name__)


class CoserveTokenizerManager(UpdatingTokenizerManager):
    """Marks requests, and ends those whose clients leave."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install_arrival_times()
        self._departures = ClientDepartures(self.abort_request, self._output_of)
        self._fingerprint: asyncio.Task[str] | None = None
        settings = compat.settings_of(self.server_args)
        self._otel_metrics = metrics_if_configured(
            settings.served_model_name, self.server_args.host, self.server_args.port
        )
        self.fetch_media_from(config_of(self.server_args).media_sources)

    async def coserve_fingerprint(self) -> str:
        """Return the fingerprint of the model that was loaded, read when it is first asked for."""
        if self._fingerprint is None:
            settings = compat.settings_of(self.server_args)
            # In a thread: it reads parts of all weights.
            reading = asyncio.to_thread(loaded_fingerprint, settings)
            self._fingerprint = asyncio.create_task(reading)
        return await asyncio.shield(self._fingerprint)

    async def serve(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        """See ``GuardedTokenizerManager``; it ends when its client leaves."""
        if (url := getattr(request, "url", None)) is not None:  # Lines of batches have none.
            note_operation(url.path)
        client = None if getattr(obj, "background", False) else request
        async with (
            self._departures.watched(client, self._key_of(obj, client)),
            aclosing(super().serve(obj, request)) as outputs,
        ):
            async for output in outputs:
                yield output

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
        return super()._send_one_request(tokenized_obj)

    def _send_batch_request(self, tokenized_objs: Any) -> Any:
        for tokenized in tokenized_objs:
            self._departures.sending(tokenized.rid)
        return super()._send_batch_request(tokenized_objs)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        ending = [] if self._otel_metrics is None else self._ending(recv_obj)
        await super()._handle_batch_output(recv_obj)
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

    def _create_tokenized_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        given = obj.sampling_params.get("custom_params")
        custom_params = with_client_marks(given, config_of(self.server_args))
        tokenized = super()._create_tokenized_object(obj, *args, **kwargs)
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
