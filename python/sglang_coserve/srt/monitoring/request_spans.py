"""What co-serving adds to SGLang's spans of a request (``--enable-trace``), in the scheduler.

A span for each time that an offline request was in a suspended step, and one for the delay that
an online request was billed. That is known only after the request has ended, and its own spans
with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

from opentelemetry import trace
from sglang.srt.observability.req_time_stats import convert_time_to_realtime_ns
from sglang.srt.observability.trace import TraceSliceContext

from sglang_coserve.core.control.bill import Delay
from sglang_coserve.srt.steps.offline_lane import OfflineLane, SuspendedBatch
from sglang_coserve.srt.steps.request_ledger import RequestLedger

_MOST_ROOTS: Final = 1 << 12
"""Online requests that were not billed yet: as many as delays that wait to be taken."""

_LEVEL: Final = 1
"""Of SGLang's levels the one that is always there."""

ScheduleBatch = Any


class RequestSpans:
    """Writes the spans of suspensions and of delays; for one rank, and only while tracing is on."""

    def __init__(self, ledger: RequestLedger) -> None:
        """``ledger`` knows the live requests."""
        self._ledger = ledger
        self._suspended: tuple[SuspendedBatch, list[Any], float] | None = None
        """The step that is suspended, its requests, and since when."""

        self._tracer = trace.get_tracer("sglang_coserve")
        self._roots: OrderedDict[str, Any] = OrderedDict()
        """The span that each online request's others are below."""

    def suspended(self, step: SuspendedBatch, now_s: float) -> None:
        """Note that a step was suspended."""
        self._suspended = step, list(step.batch.reqs), now_s

    def launched(self, batch: ScheduleBatch | None, now_s: float, lane: OfflineLane) -> None:
        """Note the batch with which a pass ends. O(requests) if it has prompts, or goes on."""
        step = lane.suspended
        if self._suspended is not None and (step is None or step.batch is batch):
            self._write("dropped" if step is None else "resumed", now_s)
        if not batch or not batch.forward_mode.is_extend():
            return
        for req in batch.reqs:
            context = req.time_stats.trace_ctx
            if not context.tracing_enable or req.rid not in self._ledger:
                continue
            if self._ledger[req.rid].is_online:
                self._roots[req.rid] = context.root_span_context
        while len(self._roots) > _MOST_ROOTS:
            self._roots.popitem(last=False)

    def billed(self, delays: Iterable[Delay]) -> None:
        """Write a span for each delay: as long as it, until the request's last token."""
        for delay in delays:
            root = self._roots.pop(delay.rid, None)
            if root is None:
                continue
            start_s = delay.last_s - max(delay.total_s, 0.0)
            attributes = {
                "coserve.delay_ms": delay.total_s * 1e3,
                "coserve.delay_ttft_ms": delay.ttft_s * 1e3,
            }
            span = self._tracer.start_span(
                "coserve delay",
                context=root,
                start_time=convert_time_to_realtime_ns(start_s),
                attributes=attributes,
            )
            span.end(convert_time_to_realtime_ns(delay.last_s))

    def _write(self, outcome: str, now_s: float) -> None:
        assert self._suspended is not None
        (step, reqs, since_s), self._suspended = self._suspended, None
        attributes = {
            "coserve.step_kind": step.kind.value,
            "coserve.layer": step.layer,
            "coserve.outcome": outcome,
        }
        for req in reqs:
            context = req.time_stats.trace_ctx
            # Of those that have ended SGLang has closed the spans.
            if context.tracing_enable and context.thread_context is not None:
                context.trace_slice(
                    TraceSliceContext(
                        slice_name="coserve suspended",
                        start_time_ns=convert_time_to_realtime_ns(since_s),
                        end_time_ns=convert_time_to_realtime_ns(now_s),
                        level=_LEVEL,
                        attrs=attributes,
                    )
                )
