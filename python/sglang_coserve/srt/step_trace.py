"""The last steps of a scheduler, for Perfetto: what ran when, up to which layer, and who was in it.

Each step becomes a line of JSON when it ends, so that whoever asks for a minute of them costs
the scheduler no more than putting the lines together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from sglang_coserve.srt.offline_lane import OfflineLane
from sglang_coserve.srt.request_ledger import RequestLedger
from sglang_coserve.srt.safepoint.batch_kind import BatchKind
from sglang_coserve.trace_events import mark, slice_of, span_begin, span_end

__all__ = ["StepTrace"]

_MOST_BYTES: Final = 16 << 20
"""Of all lines: some minutes of steps, of which one takes about a kilobyte."""

_MOST_NAMES: Final = 32
"""Requests of a class that a step names; their number is there in any case."""

Req = Any
ScheduleBatch = Any


class StepTrace:
    """A ring of events, the latest ones; for one rank. O(rows) a step.

    A step lasts from when it was launched, or the one before it ended, until its results are
    in. What ran beside the scheduler on a GPU ended a little earlier.
    """

    def __init__(self, ledger: RequestLedger, *, process: int = 1) -> None:
        """``ledger`` knows the live requests; ``process`` is the number of this replica."""
        self._ledger = ledger
        self._process = process
        self._events: deque[tuple[float, str]] = deque()
        self._num_bytes = 0
        self._launched: deque[tuple[float, int]] = deque()
        self._ended_s = 0.0
        self._spans: dict[str, str] = {}
        """Requests whose span is open: their class."""

    def launched(self, batch: ScheduleBatch | None, now_s: float, lane: OfflineLane | None) -> None:
        """Note a batch that is about to run; ``lane`` may have one that goes on."""
        if not batch:
            return
        held = None if lane is None else lane.suspended
        first_layer = held.layer if held is not None and held.batch is batch else 0
        self._launched.append((now_s, first_layer))
        if not batch.forward_mode.is_extend():
            return
        for req in batch.reqs:
            rid = req.rid
            if rid not in self._spans and rid in self._ledger:
                info = self._ledger[rid]
                kind = self._spans[rid] = info.request_class.value
                args = {"prompt_tokens": info.prompt_tokens, "batch": info.job}
                self._add(
                    info.arrival_s,
                    span_begin(rid, kind, info.arrival_s, args, process=self._process),
                )

    def ended(
        self,
        reqs: Sequence[Req],
        kind: BatchKind | None,
        now_s: float,
        has_token: Sequence[bool] = (),
        *,
        stopped_at: int | None = None,
    ) -> None:
        """Note that the batch that was launched first has its results, or was suspended.

        Args:
            reqs: Its rows.
            kind: What they did.
            now_s: Until when it ran.
            has_token: Which rows got a token; none where it was suspended.
            stopped_at: The first layer that has not run; None: it ended.
        """
        if not self._launched:
            return
        launched_s, first_layer = self._launched.popleft()
        start_s = max(launched_s, self._ended_s)
        self._ended_s = now_s
        rids: dict[str, list[str]] = {"online": [], "offline": []}
        for req in reqs:
            rids[self._spans.get(req.rid, "online")].append(req.rid)
        args: dict[str, Any] = {"rows": {of: len(found) for of, found in rids.items()}}
        args |= {of: found[:_MOST_NAMES] for of, found in rids.items() if found}
        name = "other" if kind is None else kind.value
        if first_layer or stopped_at is not None:
            args["layers"] = {"from": first_layer, "before": stopped_at}
        if first_layer:
            name += ", resumed"
        if stopped_at is not None:
            name += ", suspended"
        self._add(now_s, slice_of(name, start_s, now_s, args, process=self._process))
        for req, has in zip(reqs, has_token, strict=False):
            if has and len(req.output_ids) == 1 and (of := self._spans.get(req.rid)) is not None:
                self._add(now_s, mark(req.rid, of, "first_token", now_s, process=self._process))

    def forget(self, rid: str, now_s: float) -> None:
        """Note that a request has ended."""
        kind = self._spans.pop(rid, None)
        if kind is not None:
            self._add(now_s, span_end(rid, kind, now_s, process=self._process))

    def since(self, at_s: float) -> list[str]:
        """Return the events from ``at_s`` on, as far back as they are kept. O(events kept)."""
        return [line for event_s, line in self._events if event_s >= at_s]

    def _add(self, at_s: float, line: str) -> None:
        self._events.append((at_s, line))
        self._num_bytes += len(line)
        while self._num_bytes > _MOST_BYTES:
            self._num_bytes -= len(self._events.popleft()[1])
