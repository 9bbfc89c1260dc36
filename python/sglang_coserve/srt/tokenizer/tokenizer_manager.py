"""SGLang's tokenizer manager, which all requests pass on their way to the scheduler.

The guard checks what clients have sent; only then are the server's own marks added. Weight updates
and the end of the engine are noticed here, too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import Any, Final

from asgi_correlation_id import correlation_id
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_coserve.lines.backend import ChangeListeners
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.loaded_model import loaded_fingerprint
from sglang_coserve.srt.marks.answers import telling_refusals
from sglang_coserve.srt.marks.offline_marks import attach_marks
from sglang_coserve.srt.marks.request_marks import with_client_marks
from sglang_coserve.srt.monitoring.otel_metrics import (
    GenAiMetrics,
    note_operation,
    operation,
    provider_if_configured,
    tier_attributes,
)
from sglang_coserve.srt.optional_parts import GUARD
from sglang_coserve.srt.process_health import is_stop_asked, uvicorn_server
from sglang_coserve.srt.scheduler.scheduler import config_of
from sglang_coserve.srt.tokenizer.adapter_unloads import AdapterUnloads
from sglang_coserve.srt.tokenizer.client_presence import (
    ClientDepartures,
    install_arrival_times,
)
from sglang_coserve.srt.tokenizer.request_ids import RequestIds
from sglang_coserve.web.asgi import route_path

logger = logging.getLogger(__name__)


class WeightUpdates:
    """Identifies the loaded weights, and signals while they are being updated."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(8)
        self._count = 0
        self._num_pending = 0
        self._is_paused = False
        self.has_session = False
        """Between ``open_session`` and ``close_session``."""

        self.cache_key = ""
        """Cache namespace for the prefixes of batch lines. Not empty while the cache may hold KV of
        other weights: from an exchange on, until one succeeds that empties the cache."""

        self.listeners = ChangeListeners()
        """Told when an exchange is about to wait for the end of all requests in flight."""

        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def name(self) -> str:
        """Unique name of the current weights, across servers; empty for the initial weights."""
        return f"{self._run}/{self._count}" if self._count else ""

    @property
    def is_changing(self) -> bool:
        """True while weights are updated, or generation is paused for an update."""
        return not self._settled.is_set()

    async def settled(self) -> None:
        """Wait while ``is_changing``."""
        await self._settled.wait()

    @contextmanager
    def updating(self) -> Generator[None]:
        """Mark the weights as being updated in this context, whether or not that succeeds.

        No request is served meanwhile. Those in flight have ended before, were aborted,
        or are paused and continue with the new weights.
        """
        self._num_pending += 1
        try:
            self._begin()
            yield
        finally:
            self._num_pending -= 1
            self._end()

    def open_session(self) -> None:
        """Mark the weights as being updated until ``close_session``: between the updates, too."""
        self.has_session = True
        self._begin()

    def close_session(self) -> None:
        """End the session, whether or not weights were updated in it."""
        self.has_session = False
        self._end()

    def emptied_cache(self) -> None:
        """Record that the last update has emptied the cache.

        To be called before any request is served.
        """
        self.cache_key = ""

    def pause(self) -> None:
        """Record that generation was paused."""
        self._is_paused = True
        self._settled.clear()

    def resume(self) -> None:
        """Record that generation was resumed."""
        self._is_paused = False
        if self._num_pending or self.has_session:
            self.listeners.tell()  # Those that were paused would go on meanwhile.
        self._settle()

    def _begin(self) -> None:
        self._settled.clear()
        if not self._is_paused:
            self.listeners.tell()

    def _end(self) -> None:
        # A failed update may have changed some of the weights.
        self._count += 1
        self.cache_key = self.name
        self._settle()

    def _settle(self) -> None:
        if not (self._num_pending or self._is_paused or self.has_session):
            self._settled.set()


_IDLE_TIMEOUT_S: Final = 60.0
"""More than the scheduler needs to remove aborted requests."""

_LAST_ANSWERS_S: Final = 5
"""More than a refusal takes; what is unanswered then had no engine any more."""


_Guarded: Any = GUARD.tokenizer_manager(TokenizerManager)
_Hooked: Any = compat.hooked_tokenizer_manager(_Guarded)


class CoserveTokenizerManager(_Hooked):
    """Marks requests, and ends those whose clients leave; reports weight updates to
    ``coserve_weights``, a crash to ``coserve_on_death``, and ids to ``coserve_request_ids``."""

    served_model_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.coserve_weights = WeightUpdates()
        self.coserve_on_death: Callable[[], None] | None = None
        """Called when the engine has crashed, right before this process ends."""
        self.coserve_has_stopped = False
        """After SIGTERM all requests were answered and the schedulers have ended."""

        for name in compat.UPDATE_COMMUNICATORS:
            setattr(self, name, self._once_idle(getattr(self, name)))
        install_arrival_times()
        self.coserve_request_ids = RequestIds()
        self._departures = ClientDepartures(self)
        self._adapter_unloads = AdapterUnloads(self)
        self._fingerprint: asyncio.Task[str] | None = None
        settings = compat.settings_of(self.server_args)
        self._otel_metrics: GenAiMetrics | None = None
        if (make_provider := provider_if_configured()) is not None:
            self._otel_metrics = GenAiMetrics(
                make_provider(),
                settings.served_model_name,
                self.server_args.host,
                self.server_args.port,
            )
        self.guard_with(settings, config_of(self.server_args).media_sources)

    async def coserve_fingerprint(self) -> str:
        """Return the fingerprint of the model that was loaded, read when it is first asked for."""
        if self._fingerprint is None:
            settings = compat.settings_of(self.server_args)
            # In a thread: it reads parts of all weights.
            reading = asyncio.to_thread(loaded_fingerprint, settings)
            self._fingerprint = asyncio.create_task(reading)
        return await asyncio.shield(self._fingerprint)

    async def serve(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        """See ``RequestGuard.tokenizer_manager``; it ends when its client leaves."""
        if self._otel_metrics is not None and hasattr(request, "url"):  # Lines have none.
            note_operation(route_path(request.scope))
        client = None if getattr(obj, "background", False) else request
        async with (
            self._departures.watched(client),
            aclosing(super().serve(obj, request)) as outputs,
            aclosing(telling_refusals(outputs)) as told,
        ):
            async for output in told:
                yield output

    def _send_one_request(self, tokenized_obj: Any) -> Any:
        self._sending(tokenized_obj)
        return super()._send_one_request(tokenized_obj)

    def _send_batch_request(self, tokenized_objs: Any) -> Any:
        for tokenized in tokenized_objs:
            self._sending(tokenized)
        return super()._send_batch_request(tokenized_objs)

    def _sending(self, tokenized: Any) -> None:
        self._departures.sending(tokenized)
        self._adapter_unloads.sending(tokenized)
        self.coserve_request_ids.sending(tokenized.rid)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        ending = [] if self._otel_metrics is None else self._ending(recv_obj)
        await super()._handle_batch_output(recv_obj)
        for state, output_tokens, reason in ending:
            self._note_end(state, output_tokens, reason)

    def _ending(self, recv_obj: Any) -> list[tuple[Any, int, Any]]:
        """Return the states of requests that end with these outputs, output tokens and reasons."""
        tokens = getattr(recv_obj, "completion_tokens", None)
        return [
            (self.rid_to_state[rid], tokens[index] if tokens else 0, reason)
            for index, (rid, reason) in enumerate(
                zip(recv_obj.rids, recv_obj.finished_reasons, strict=True)
            )
            if reason is not None and rid in self.rid_to_state
        ]

    def _handle_abort_req(self, recv_obj: Any) -> None:
        # Requests that are refused, or aborted while they wait, end so.
        state = self.rid_to_state.get(recv_obj.rid)
        super()._handle_abort_req(recv_obj)
        if state is not None and state.finished:
            self._note_end(state, 0, recv_obj.finished_reason or {"type": "abort"})

    def _note_end(self, state: Any, output_tokens: int, reason: Any) -> None:
        if self._otel_metrics is not None:
            is_abort = reason["type"] == "abort"
            error = str(reason.get("err_type") or "abort") if is_abort else None
            self._otel_metrics.finished(state.time_stats, output_tokens, error)

    def _create_tokenized_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        tokenized = super()._create_tokenized_object(obj, *args, **kwargs)
        params = tokenized.sampling_params
        # With what SGLang has added: the operator's defaults, a budget of thinking.
        params.custom_params = with_client_marks(params.custom_params, config_of(self.server_args))
        attach_marks(params)
        self._describe(tokenized)
        return tokenized

    def _describe(self, tokenized: Any) -> None:
        """Say in metrics and spans which tier a request has, and in spans its ``x-request-id``."""
        state = self.rid_to_state.get(tokenized.rid)
        is_traced = state is not None and state.time_stats.trace_ctx.tracing_enable
        if state is None or not (is_traced or self._otel_metrics is not None):
            return
        tiers = tier_attributes(tokenized)
        state.time_stats.attributes = tiers | {"gen_ai.operation.name": operation()}
        if is_traced:
            request_id = correlation_id.get()
            named = {"http.request.header.x-request-id": [request_id]} if request_id else {}
            state.time_stats.trace_ctx.trace_set_root_attrs(tiers | named)

    # --- Weight updates, and the end ----------------------------------------------------------

    def dump_requests_before_crash(self, *args: Any, **kwargs: Any) -> None:
        """Report the crash: SGLang calls this after every failure that ends its processes."""
        if self.coserve_on_death is not None and not is_stop_asked(self):
            self.coserve_on_death()
        super().dump_requests_before_crash(*args, **kwargs)

    def engine_has_ended(self) -> None:
        """Refuse what comes after the schedulers have ended, when the HTTP server is about to end.

        A request over a connection that is open, a router's say, would never be answered, and the
        server would wait for it for ever: Uvicorn waits for seconds only.
        """
        self.coserve_has_stopped = True
        if (server := uvicorn_server()) is not None:
            server.config.timeout_graceful_shutdown = _LAST_ANSWERS_S

    async def update_weights_from_disk(self, obj: Any, *args: Any, **options: Any) -> Any:
        """See ``TokenizerManager``; the model keeps the name that clients call it by."""
        name = self.served_model_name
        try:
            return await self._update(super().update_weights_from_disk, obj, *args, **options)
        finally:
            self.served_model_name = name

    async def update_weights_from_distributed(self, obj: Any, *args: Any, **options: Any) -> Any:
        """See ``TokenizerManager``."""
        return await self._update(super().update_weights_from_distributed, obj, *args, **options)

    async def update_weights_from_tensor(self, obj: Any, *args: Any, **options: Any) -> Any:
        """See ``TokenizerManager``."""
        return await self._update(super().update_weights_from_tensor, obj, *args, **options)

    async def update_weights_from_ipc(self, obj: Any, *args: Any, **options: Any) -> Any:
        """See ``TokenizerManager``."""
        return await self._update(super().update_weights_from_ipc, obj, *args, **options)

    async def _update(
        self, update: Callable[..., Any], obj: Any, *args: Any, **options: Any
    ) -> Any:
        with self.coserve_weights.updating():
            answer = await update(obj, *args, **options)
        # SGLang reports a failure, too, where it has updated weights, but not emptied the cache.
        if answer[0] and obj.flush_cache:
            self.coserve_weights.emptied_cache()
        return answer

    async def begin_session(self, begin: Callable[[], Any]) -> Any:
        """Let lines wait from the beginning of a session of weight updates to its end."""
        weights = self.coserve_weights
        is_open = weights.has_session
        weights.open_session()  # First: SGLang waits for the end of all that is in flight.
        try:
            answer = await begin()
            is_open = is_open or answer[0]
        finally:
            if not is_open:
                weights.close_session()
        return answer

    async def end_session(self, end: Callable[[], Any]) -> Any:
        """Let lines go on, if the session has ended."""
        answer = await end()
        if answer[0]:
            self.coserve_weights.close_session()
        return answer

    async def pause_generation(self, obj: Any) -> None:
        """See ``TokenizerManager``."""
        self.coserve_weights.pause()
        try:
            await super().pause_generation(obj)
        finally:
            self._resume_unless_paused()

    async def continue_generation(self, obj: Any) -> None:
        """See ``TokenizerManager``."""
        try:
            await super().continue_generation(obj)
        finally:
            self._resume_unless_paused()

    def _resume_unless_paused(self) -> None:
        """Follow SGLang, however a call of it has ended."""
        if not self.is_pause:
            self.coserve_weights.resume()

    async def _wait_for_model_update_from_disk(self, obj: Any) -> Any:
        return await self._once_idle(super()._wait_for_model_update_from_disk)(obj)

    def _once_idle(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``update`` preceded by a wait until the scheduler has removed aborted requests.

        SGLang waits only until no client awaits an answer. Aborted requests may then still be in
        the scheduler for a step, and its process dies if it cannot flush its cache.
        """

        async def update_once_idle(obj: Any) -> Any:
            if obj.flush_cache and not self.is_pause:
                flushed = await self.flush_cache(timeout_s=_IDLE_TIMEOUT_S)
                if not flushed.success:
                    raise ValueError(
                        f"the engine was not idle after {_IDLE_TIMEOUT_S:.0f} s, so that its"
                        " weights cannot be exchanged: try again"
                    )
            return await update(obj)

        return update_once_idle
