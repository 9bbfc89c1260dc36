"""Spans of co-serving below SGLang's spans of a request (``--enable-trace``), in the scheduler.

An offline request gets a span for each time that its step was suspended. An online request gets a
span for the delay that it was billed, which is known only after its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry import trace
from sglang.srt.observability.req_time_stats import convert_time_to_realtime_ns

from sglang_coserve.core.control.bill import Delay
from sglang_coserve.srt.steps.engine_requests import EngineRequests
from sglang_coserve.srt.steps.step_record import StepRecord

_MOST_ROOTS: Final = 1 << 12
"""Online requests that were not billed yet: as many as delays that wait to be taken."""


class RequestSpans:
    """Writes the spans of suspensions and of delays; for one rank, and only while tracing is on."""

    def __init__(self, requests: EngineRequests) -> None:
        """``requests`` has the live ones."""
        self._requests = requests
        self._tracer = trace.get_tracer("sglang_coserve")
        self._roots: OrderedDict[str, Any] = OrderedDict()
        """The contexts of the root spans of online requests by rid."""

    def ended(self, record: StepRecord) -> None:
        """Take in a step. O(its requests) if it computed prompts, or was suspended."""
        for request in record.first:
            if request.info.is_online and (root := self._root(request.info.rid)) is not None:
                self._roots[request.info.rid] = root
        while len(self._roots) > _MOST_ROOTS:
            self._roots.popitem(last=False)
        if record.suspensions:
            rids = record.result.dropped or [one.info.rid for one in record.requests]
            self._suspended(record, rids)

    def billed(self, delays: Iterable[Delay]) -> None:
        """Write a span for each delay: as long as it, until the request's last token."""
        for delay in delays:
            root = self._roots.pop(delay.rid, None)
            if root is None:
                continue
            attributes = {
                "coserve.delay_ms": delay.total_s * 1e3,
                "coserve.delay_ttft_ms": delay.ttft_s * 1e3,
            }
            begins_s = delay.last_s - max(delay.total_s, 0.0)
            self._write("coserve delay", root, begins_s, delay.last_s, attributes)

    def _suspended(self, record: StepRecord, rids: Iterable[str]) -> None:
        roots = [root for rid in rids if (root := self._root(rid)) is not None]
        for number, stop in enumerate(record.suspensions, 1):
            is_dropped = record.is_dropped and number == len(record.suspensions)
            attributes = {
                "coserve.step_kind": "" if record.kind is None else record.kind.value,
                "coserve.layer": stop.layer,
                "coserve.outcome": "dropped" if is_dropped else "resumed",
            }
            for root in roots:
                self._write("coserve suspended", root, stop.stopped_s, stop.resumed_s, attributes)

    def _root(self, rid: str) -> Any:
        """Return the context of a request's root span; None without one."""
        live = self._requests.get(rid)
        if live is None:
            return None
        context = live.req.time_stats.trace_ctx
        return context.root_span_context if context.tracing_enable else None

    def _write(
        self, name: str, root: Any, begins_s: float, ends_s: float, attributes: Mapping[str, Any]
    ) -> None:
        start = convert_time_to_realtime_ns(begins_s)
        span = self._tracer.start_span(
            name, context=root, start_time=start, attributes=dict(attributes)
        )
        span.end(convert_time_to_realtime_ns(ends_s))
