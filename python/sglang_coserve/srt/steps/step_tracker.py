"""Tracks the batches of the engine, and turns each into a ``StepResult`` for the core."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_coserve.core.step import JobTokens, PrefillChunk, ServedRequest, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.forward_kind import ForwardKind, kind_of, prefilled, stats_of
from sglang_coserve.srt.steps.request_ledger import RequestLedger

Req = Any
ScheduleBatch = Any


@dataclass(slots=True)
class TrackedStep:
    """A step whose result is not complete yet."""

    result: StepResult
    """What is known of it."""

    has_results: bool
    """Whether its results are in: it is known which requests got a token."""

    untimed_parts: int = 0
    """Parts of it that were launched, and whose times are not known yet."""

    def learn(self, **values: Any) -> None:
        """Set fields of its result."""
        self.result = replace(self.result, **values)

    def ran(self, seconds: float) -> None:
        """Add the time of its next part; 0 if unknown."""
        self.untimed_parts -= 1
        if seconds > 0 and not self.result.batch.is_empty:
            self.learn(seconds=(self.result.seconds or 0.0) + seconds)


class StepTracker:
    """Tracks every batch of the engine in order, planned by the core or not.

    "Pass" here is one scheduling round of SGLang's event loop, not a forward pass. A pass begins
    (``next_pass``), may carry out a step of the core (``started``), and launches its batch
    (``launched``). The batch may be suspended while it runs
    (``suspended``), and then be resumed (``resumed``) or dropped in a later pass. Its results
    come in the same or the next pass (``processed``). A batch that the core did not plan is a
    step without a number.

    A step lasts as long as its parts: one, or several if it was suspended. If the host waits for
    the device, a part lasts from pass to pass. If it runs ahead (overlap scheduling, except on a
    CPU), the device tells how long its parts were (``PartTimer``). In a pipeline of K micro-batches
    a batch runs for K passes, until its micro-batch is next again.
    """

    def __init__(
        self, ledger: RequestLedger, *, is_overlapped: bool, micro_batches: int = 1
    ) -> None:
        """``ledger`` has the requests; the times of their tokens are recorded in it.

        ``is_overlapped``: the host runs ahead of the device.
        """
        self._ledger = ledger
        self._is_overlapped = is_overlapped
        self._micro_batches = micro_batches
        self._pass_s: float | None = None
        self._planned: int | None = None
        self._planning_s = 0.0
        self._resumed: TrackedStep | None = None
        self._last: deque[TrackedStep | None] = deque(maxlen=2 * micro_batches - 1)
        """Steps of the last passes; None for a pass in which nothing ran."""

        self._untimed: deque[TrackedStep] = deque()
        """The step of each part whose time is not known yet, in order; not in a pipeline."""

        self._running: deque[TrackedStep] = deque()
        """Launched batches whose results are pending, in order."""

        self._results: list[tuple[TrackedStep, Sequence[Req], Sequence[bool]]] = []
        """Results since the last pass: the step, its requests, and whether each got a token."""

        self._open: deque[TrackedStep] = deque()

    def next_pass(
        self, now_s: float, parts_s: Sequence[float] = (), results_s: float | None = None
    ) -> list[StepResult]:
        """Begin a pass; return the results that are complete now, in order. O(their requests).

        Args:
            now_s: The time.
            parts_s: The times of the next parts, as far as the device tells them.
            results_s: When the results since the last pass came; by default now.
        """
        if self._micro_batches > 1:
            self._note_round(now_s)
        elif not self._is_overlapped and self._untimed:
            assert self._pass_s is not None
            # SGLang may have launched more without asking for prefills: then none has its time.
            is_one = len(self._untimed) == 1
            parts_s = [now_s - self._pass_s if is_one else 0.0] * len(self._untimed)
        for part_s in parts_s:
            self._untimed.popleft().ran(part_s)
        for step, reqs, has_token in self._results:
            self._note_results(step, reqs, has_token, now_s if results_s is None else results_s)
        self._results.clear()
        self._pass_s = now_s
        results = []
        while self._open and not self._open[0].untimed_parts and self._open[0].has_results:
            results.append(self._open.popleft().result)
        return results

    def decided(self, now_s: float) -> None:
        """Note that what is to be run in this pass was decided by now."""
        # Beside a running batch, or another stage's, it takes no time of its own.
        if not self._is_overlapped and self._micro_batches == 1 and self._pass_s is not None:
            self._planning_s = now_s - self._pass_s

    def started(self, step: int) -> None:
        """Record that this pass carries out a step of the core."""
        self._planned = step

    def launched(self, batch: ScheduleBatch | None) -> None:
        """Record the batch that this pass launches; None if nothing is to run. O(requests)."""
        number, self._planned = self._planned, None
        planning_s, self._planning_s = self._planning_s, 0.0
        step, self._resumed = self._resumed, None
        if step is not None:
            self._open.append(step)
        elif number is not None or batch:
            assert self._pass_s is not None
            stats, chunks = _content(batch)
            result = StepResult(
                number, self._pass_s, batch=stats, chunks=chunks, planning_s=planning_s
            )
            step = TrackedStep(result, has_results=not batch)
            self._open.append(step)
        self._last.append(step)
        if batch:
            assert step is not None
            self._running.append(step)
            step.untimed_parts += 1
            if self._micro_batches == 1:
                self._untimed.append(step)

    def suspended(self) -> TrackedStep:
        """Return the step of the batch launched last, which was suspended."""
        step = self._open.pop()
        assert step is self._last[-1]
        return step

    def resumed(self, step: TrackedStep) -> None:
        """Record that this pass resumes a suspended step."""
        step.learn(suspensions=step.result.suspensions + 1)
        self._resumed = step

    def dropped(self, step: TrackedStep, rids: Sequence[str]) -> StepResult:
        """Return the result of a suspended step that is dropped."""
        result = step.result
        # What it ran is lost, and not known before the device has told.
        seconds = None if step.untimed_parts else result.seconds
        return StepResult(result.step, result.started_s, seconds, dropped=tuple(rids))

    def processed(self, reqs: Sequence[Req], has_token: Sequence[bool]) -> None:
        """Record the results of the oldest pending batch: its requests, and which got a token."""
        self._results.append((self._running.popleft(), reqs, has_token))

    def _note_round(self, now_s: float) -> None:
        """Set the duration of the current micro-batch's last step, and what overlapped with it."""
        passes, before = list(self._last), self._micro_batches - 1
        place = len(passes) - self._micro_batches
        step = passes[place] if place >= 0 else None
        if step is None:
            return
        batches = [StepStats() if other is None else other.result.batch for other in passes]
        nothing = [StepStats()] * (before - place)
        step.untimed_parts = 0
        step.learn(overlapping=(*nothing, *batches[:place], *batches[place + 1 :]))
        seconds = now_s - step.result.started_s
        if not step.result.batch.is_empty and seconds > 0:
            step.learn(seconds=seconds)

    def _note_results(
        self, step: TrackedStep, reqs: Sequence[Req], has_token: Sequence[bool], now_s: float
    ) -> None:
        """Note the tokens of a step, and whose its requests were."""
        live_of, served, offline_jobs = self._ledger.live, [], []
        for req, has in zip(reqs, has_token, strict=True):
            live = live_of(req)
            if live is None:
                continue  # It was aborted meanwhile, and another one may have its rid.
            if live.is_online:
                token_s = now_s if has else None
                served.append(ServedRequest(live.info, token_s))
            else:
                offline_jobs.append(live.info.job)
            if has:
                live.came(now_s)
        step.has_results = True
        tokens_of = Counter(() if step.result.batch.is_empty else offline_jobs)
        for rid, tokens in step.result.chunks if tokens_of else ():
            live = self._ledger.get(rid)
            if live is not None and not live.is_online:
                tokens_of[live.info.job] += tokens - 1
        jobs = tuple([JobTokens(job, tokens) for job, tokens in tokens_of.items()])
        step.learn(served=tuple(served), jobs=jobs)


def _content(batch: ScheduleBatch | None) -> tuple[StepStats, tuple[PrefillChunk, ...]]:
    """Return the sums over a batch that is ready to run, and its prefills."""
    kind = kind_of(batch) if batch else None
    if batch is None or kind is None:
        return StepStats(), ()
    prefills = () if kind is ForwardKind.DECODE else prefilled(batch)
    lens = batch.extend_lens if prefills else ()
    chunks = [PrefillChunk(req.rid, tokens) for req, tokens in zip(prefills, lens, strict=False)]
    return stats_of(batch, kind), tuple(chunks)
