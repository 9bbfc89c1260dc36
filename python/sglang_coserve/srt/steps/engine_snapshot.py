"""Builds the core's ``EngineSnapshot`` from SGLang's scheduler."""

from __future__ import annotations

from typing import Any

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request, SuspendedStep
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.request_ledger import RequestLedger

__all__ = ["snapshot_of"]

ScheduleBatch = Any


def snapshot_of(
    scheduler: Any,
    pools: KvPools,
    view: EngineView,
    ledger: RequestLedger,
    running_batch: ScheduleBatch,
    now_s: float,
    keeps_prefixes: bool,
    suspended: SuspendedStep | None,
    stop_share: float,
    decodes_stop: bool,
    resume_s: float,
) -> EngineSnapshot:
    """Return the state of SGLang's ``scheduler``. O(requests + waiting online requests).

    Args:
        scheduler: SGLang's scheduler.
        pools: Its KV pools.
        view: Its requests, and those outside of its batches.
        ledger: The core's data on these requests.
        running_batch: SGLang's batch of decodes.
        now_s: The time on the clock shared by all ranks.
        keeps_prefixes: See ``EngineSnapshot``.
        suspended: The suspended step, if any.
        stop_share: See ``EngineSnapshot``.
        decodes_stop: See ``EngineSnapshot``.
        resume_s: See ``EngineSnapshot``.
    """
    admitted = _admitted(view, ledger, running_batch)
    num_decodes = len(running_batch.reqs) + len(view.paused_requests.paused)
    return EngineSnapshot(
        now_s=now_s,
        admitted=admitted,
        waiting=ledger.waiting_requests(view.waiting),
        free_kv_tokens=pools.free_tokens,
        evictable_kv_tokens=pools.evictable_tokens,
        free_slots=max(0, scheduler.get_num_allocatable_reqs(len(admitted) + len(view.suspended))),
        max_batch_tokens=num_decodes
        + (scheduler.chunked_prefill_size or scheduler.max_prefill_tokens),
        page_tokens=scheduler.page_size,
        keeps_prefixes=keeps_prefixes,
        window_tokens=pools.window_tokens,
        free_window_tokens=pools.free_window_tokens,
        elsewhere=tuple(ledger.decoding_requests(view.elsewhere(), RequestState.DECODING)),
        suspended=suspended,
        stop_share=stop_share,
        decodes_stop=decodes_stop,
        resume_s=resume_s,
    )


def _admitted(
    view: EngineView, ledger: RequestLedger, running_batch: ScheduleBatch
) -> list[Request]:
    admitted = ledger.decoding_requests(running_batch.reqs, RequestState.DECODING)
    admitted += ledger.decoding_requests(view.paused_requests.paused, RequestState.PAUSED)
    admitted += [
        ledger.prefilling_request(req, RequestState.PARKED) for req in view.paused_requests.parked
    ]
    if view.chunk is not None:
        admitted.append(ledger.prefilling_request(view.chunk, RequestState.PREFILLING))
    return admitted
