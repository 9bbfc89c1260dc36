"""Builds the core's ``EngineSnapshot`` from SGLang's scheduler."""

from __future__ import annotations

from typing import Any, Final

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.request_ledger import RequestLedger

__all__ = ["snapshot_of"]

ScheduleBatch = Any


_RESUME_S: Final = 1.6e-3
"""The cost of suspending and resuming a step, in seconds, until one has shown it: the median on a
CPU (tag ``measurements-1``)."""


def snapshot_of(
    parts: EngineParts, running_batch: ScheduleBatch, now_s: float, *, keeps_prefixes: bool
) -> EngineSnapshot:
    """Return the state of SGLang's scheduler. O(requests + waiting online requests).

    Args:
        parts: Its parts.
        running_batch: SGLang's batch of decodes.
        now_s: The time on the clock shared by all ranks.
        keeps_prefixes: See ``EngineSnapshot``.
    """
    scheduler, pools, view, ledger = parts.scheduler, parts.pools, parts.view, parts.ledger
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
        suspended=None if parts.lane is None else parts.lane.seen(),
        stop_share=parts.runner.stop_share,
        decodes_stop=parts.runner.decodes_stop,
        resume_s=_RESUME_S,
        ahead_s=parts.clock.ahead_s(),
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
