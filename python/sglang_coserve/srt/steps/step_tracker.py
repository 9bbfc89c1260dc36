"""Tracks the batches of the engine, and turns each into a ``StepResult`` for the core."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_coserve.core.step import JobTokens, PrefillChunk, ServedRequest, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.forward_kind import ForwardKind, kind_of, prefilled, stats_of
from sglang_coserve.srt.steps.request_ledger import RequestLedger

Req = Any
ScheduleBatch = Any


@dataclass(slots=True)
class _Step:
    """A step whose result is not complete yet."""

    number: int | None
    """Number of its plan; None if the core did not plan it."""

    started_s: float
    batch: StepStats
    chunks: tuple[PrefillChunk, ...]
    seconds: float | None = None
    """What its timed parts took; None if nothing, or unknown."""

    served: tuple[ServedRequest, ...] = ()
    jobs: tuple[JobTokens, ...] = ()
    planning_s: float = 0.0
    suspensions: int = 0
    """How often it was suspended and resumed."""

    untimed_parts: int = 0
    """Parts of it that were launched, and whose times are not known yet."""

    has_results: bool = False
    """Whether its results are in: it is known which requests got a token."""

    overlapping: tuple[StepStats, ...] = ()
    """See ``StepResult``."""

    def ran(self, seconds: float) -> None:
        """Add the time of its next part; 0 if unknown."""
        self.untimed_parts -= 1
        if seconds > 0 and not self.batch.is_empty:
            self.seconds = (self.seconds or 0.0) + seconds

    def result(self) -> StepResult:
        return StepResult(
            self.number,
            self.started_s,
            self.seconds,
            self.batch,
            self.chunks,
            self.served,
            overlapping=self.overlapping,
            jobs=self.jobs,
            suspensions=self.suspensions,
            planning_s=self.planning_s,
        )


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
        self._suspended: _Step | None = None
        self._resumed: _Step | None = None
        self._last: deque[_Step | None] = deque(maxlen=2 * micro_batches - 1)
        """Steps of the last passes; None for a pass in which nothing ran."""

        self._untimed: deque[_Step] = deque()
        """The step of each part whose time is not known yet, in order; not in a pipeline."""

        self._running: deque[_Step] = deque()
        """Launched batches whose results are pending, in order."""

        self._results: list[tuple[_Step, Sequence[Req], Sequence[bool]]] = []
        """Results since the last pass: the step, its requests, and whether each got a token."""

        self._open: deque[_Step] = deque()

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
            step = self._open.popleft()
            results.append(step.result())
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
            step = _Step(number, self._pass_s, *_content(batch), has_results=not batch)
            step.planning_s = planning_s
            self._open.append(step)
        self._last.append(step)
        if batch:
            assert step is not None
            self._running.append(step)
            step.untimed_parts += 1
            if self._micro_batches == 1:
                self._untimed.append(step)

    def suspended(self) -> None:
        """Record that the batch launched last was suspended."""
        step = self._last[-1]
        self._suspended = self._open.pop()
        assert self._suspended is step

    def resumed(self) -> None:
        """Record that this pass resumes the suspended step."""
        self._resumed, self._suspended = self._suspended, None
        assert self._resumed is not None
        self._resumed.suspensions += 1

    def dropped(self, rids: Sequence[str]) -> StepResult:
        """Drop the suspended step, and return its result."""
        step, self._suspended = self._suspended, None
        assert step is not None
        # What it ran is lost, and not known before the device has told.
        seconds = None if step.untimed_parts else step.seconds
        return StepResult(step.number, step.started_s, seconds, dropped=tuple(rids))

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
        batches = [StepStats() if other is None else other.batch for other in passes]
        nothing = [StepStats()] * (before - place)
        step.overlapping = (*nothing, *batches[:place], *batches[place + 1 :])
        step.untimed_parts = 0
        if not step.batch.is_empty and now_s > step.started_s:
            step.seconds = now_s - step.started_s

    def _note_results(
        self, step: _Step, reqs: Sequence[Req], has_token: Sequence[bool], now_s: float
    ) -> None:
        """Note the tokens of a step, and whose its requests were."""
        live_of, served, offline_jobs = self._ledger.live, [], []
        for req, has in zip(reqs, has_token, strict=True):
            live = live_of(req)
            if live is None:
                continue  # It was aborted meanwhile, and another one may have its rid.
            if live.is_online:
                token_s = now_s if has else None
                served.append(ServedRequest(live.info, live.last_token_s, token_s))
            else:
                offline_jobs.append(live.info.job)
            if has:
                live.last_token_s = now_s
        step.served, step.has_results = tuple(served), True
        if step.batch.is_empty:
            return
        tokens_of = Counter(offline_jobs)
        for rid, tokens in step.chunks if offline_jobs else ():
            live = self._ledger.get(rid)
            if live is not None and not live.is_online:
                tokens_of[live.info.job] += tokens - 1
        step.jobs = tuple([JobTokens(job, tokens) for job, tokens in tokens_of.items()])


def _content(batch: ScheduleBatch | None) -> tuple[StepStats, tuple[PrefillChunk, ...]]:
    """Return the sums over a batch that is ready to run, and its prefills."""
    kind = kind_of(batch) if batch else None
    if batch is None or kind is None:
        return StepStats(), ()
    prefills = () if kind is ForwardKind.DECODE else prefilled(batch)
    lens = batch.extend_lens if prefills else ()
    chunks = [PrefillChunk(req.rid, tokens) for req, tokens in zip(prefills, lens, strict=False)]
    return stats_of(batch, kind), tuple(chunks)
