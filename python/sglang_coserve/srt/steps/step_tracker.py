"""Tracks the batches of the engine, and turns each into a ``StepRecord``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sglang_coserve.core.step import JobTokens, PrefillChunk, ServedRequest, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.forward_kind import ForwardKind, kind_of, prefilled, stats_of
from sglang_coserve.srt.steps.engine_requests import EngineRequests
from sglang_coserve.srt.steps.step_record import Reception, StepRecord, StepRequest, Suspension

Req = Any
ScheduleBatch = Any


class _Prompt(NamedTuple):
    """A piece of a prompt in a launched batch."""

    tokens: int
    context_tokens: int
    reception: Reception | None = None
    """The way of its request to this batch, its first; None in later batches."""


_NO_PROMPT = _Prompt(0, 0)


@dataclass(slots=True)
class TrackedStep:
    """A step whose record is not complete yet."""

    record: StepRecord
    """The record, as far as it is known."""

    prompts: Mapping[str, _Prompt]
    """Pieces of prompts by rid."""

    has_results: bool
    """True when it is known which requests got a token."""

    untimed_parts: int = 0
    """Launched parts whose times are not known yet."""

    stopped: tuple[int, float] | None = None
    """The layer and the time at which the step was suspended; None unless it is suspended."""

    stopped_pass_s: float = 0.0
    """Time of the pass in which it was suspended last, which is the same on all ranks."""

    def note(self, **values: Any) -> None:
        """Set fields of its record."""
        self.record = replace(self.record, **values)

    def learn(self, **values: Any) -> None:
        """Set fields of its result."""
        self.note(result=replace(self.record.result, **values))

    def ran(self, seconds: float) -> None:
        """Add the measured time of its next part; ``seconds`` is 0 if the time is unknown."""
        self.untimed_parts -= 1
        result = self.record.result
        if seconds > 0 and not result.batch.is_empty:
            self.learn(seconds=(result.seconds or 0.0) + seconds)

    def suspended_record(self, now_s: float) -> StepRecord:
        """Return the record of the step, which is suspended, as if it went on at ``now_s``."""
        assert self.stopped is not None
        stops = (*self.record.suspensions, Suspension(*self.stopped, now_s))
        return replace(self.record, suspensions=stops, ended_s=now_s)

    def goes_on(self, now_s: float) -> None:
        """Note that the suspended step is resumed, or dropped."""
        self.record = self.suspended_record(now_s)
        self.stopped = None


class _Processed(NamedTuple):
    """A step whose results SGLang has processed since the last pass."""

    step: TrackedStep
    reqs: Sequence[Req] = ()
    output_tokens: Sequence[int] = ()
    """Length of the output of each request."""

    ended_s: float = 0.0
    """Time of the results, of this rank."""


class StepTracker:
    """Tracks every batch of the engine in order, planned by the core or not.

    "Pass" here is one scheduling round of SGLang's event loop, not a forward pass. A pass begins
    (``next_pass``), may carry out a plan of the core (``started``), has its batch (``launched``),
    and runs the batch (``runs``). The batch may be suspended while it runs
    (``suspended``), and then be resumed (``resumed``) or dropped in a later pass. Its results
    come in the same or the next pass (``processed``). A batch that the core did not plan is a
    step without a number.

    A step lasts as long as its parts: one, or several if it was suspended. If the host waits for
    the device, a part lasts from pass to pass. If it runs ahead (overlap scheduling, except on a
    CPU), the device tells how long its parts were (``PartTimer``). In a pipeline of K micro-batches
    a batch runs for K passes, until its micro-batch is next again.

    Times named ``now_s`` are the same on all ranks, except where a method says otherwise.
    """

    def __init__(
        self, requests: EngineRequests, *, is_overlapped: bool, micro_batches: int = 1
    ) -> None:
        """Track no step yet.

        Args:
            requests: The live requests; the tracker records the times of their tokens.
            is_overlapped: True if the host runs ahead of the device.
            micro_batches: Micro-batches of a pipeline; 1 without a pipeline.
        """
        self._requests = requests
        self._is_overlapped = is_overlapped
        self._micro_batches = micro_batches
        self._pass_s: float | None = None
        self._plan: StepPlan | None = None
        self._planning_s = 0.0
        self._resumed: TrackedStep | None = None
        self._last: deque[TrackedStep | None] = deque(maxlen=2 * micro_batches - 1)
        """Steps of the last passes; None for a pass in which nothing ran."""

        self._untimed: deque[TrackedStep] = deque()
        """The step of each part whose time is not known yet, in order; not in a pipeline."""

        self._running: deque[TrackedStep] = deque()
        """Launched batches whose results are pending, in order."""

        self._processed: list[_Processed] = []

        self._open: deque[TrackedStep] = deque()
        self._ended: list[Req] = []

    def next_pass(
        self, now_s: float, parts_s: Sequence[float] = (), results_s: float | None = None
    ) -> list[StepRecord]:
        """Begin a pass; return the records that are complete now, in order. O(their requests).

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
        for processed in self._processed:
            self._note_results(processed, now_s if results_s is None else results_s)
        self._processed.clear()
        self._pass_s = now_s
        records = []
        while self._open and not self._open[0].untimed_parts and self._open[0].has_results:
            records.append(self._open.popleft().record)
        if records:
            records[-1] = replace(records[-1], left=self._requests.take_left())
        return records

    def take_ended(self) -> list[Req]:
        """Remove and return the requests that ended with the results known by this pass."""
        ended, self._ended = self._ended, []
        return ended

    def kept(self) -> Iterator[Req]:
        """Yield the requests whose results came since the last pass, ended ones among them."""
        yield from self._ended
        for processed in self._processed:
            yield from processed.reqs

    def decided(self, now_s: float) -> None:
        """Note that what is to be run in this pass was decided by now."""
        # Beside a running batch, or another stage's, it takes no time of its own.
        if not self._is_overlapped and self._micro_batches == 1 and self._pass_s is not None:
            self._planning_s = now_s - self._pass_s

    def started(self, plan: StepPlan) -> None:
        """Record that this pass carries out a plan of the core."""
        self._plan = plan

    def launched(self, batch: ScheduleBatch | None) -> None:
        """Record the batch that this pass launches; None if nothing is to run. O(requests)."""
        plan, self._plan = self._plan, None
        planning_s, self._planning_s = self._planning_s, 0.0
        step, self._resumed = self._resumed, None
        if step is not None:
            self._open.append(step)
        elif plan is not None or batch:
            assert self._pass_s is not None
            kind, stats, chunks = _content(batch)
            number = None if plan is None else plan.step
            result = StepResult(
                number, self._pass_s, batch=stats, chunks=chunks, planning_s=planning_s
            )
            record = StepRecord(result, plan, kind, launched_s=self._pass_s, ended_s=self._pass_s)
            step = TrackedStep(record, self._prompts(batch), has_results=not batch)
            self._open.append(step)
        self._last.append(step)
        if batch:
            assert step is not None
            self._running.append(step)
            step.untimed_parts += 1
            if self._micro_batches == 1:
                self._untimed.append(step)

    def runs(self, now_s: float, paced_s: float = 0.0) -> None:
        """Record that the batch of this pass, or the rest of a suspended one, runs from now on.

        ``paced_s`` says how long pacing has held the launch back. Both are times of this rank.
        """
        step = self._last[-1] if self._last else None
        if step is None:
            return
        if step.stopped is None:
            step.note(launched_s=now_s, paced_s=paced_s)
        else:
            step.goes_on(now_s)

    def _prompts(self, batch: ScheduleBatch | None) -> Mapping[str, _Prompt]:
        """Return the pieces of prompts in a batch by rid, and note who begins."""
        if not batch or not batch.forward_mode.is_extend():
            return {}
        begun = self._requests.note_prompt
        lens = zip(batch.extend_lens, batch.prefix_lens, strict=True)
        return {
            req.rid: _Prompt(tokens, context_tokens, begun(req))
            for req, (tokens, context_tokens) in zip(prefilled(batch), lens, strict=False)
        }

    def suspended(self, layer: int, now_s: float) -> TrackedStep:
        """Return the step of the batch launched last, which was suspended before ``layer``.

        ``now_s`` is the time of this rank.
        """
        step = self._open.pop()
        assert step is self._last[-1]
        assert self._pass_s is not None
        step.stopped, step.stopped_pass_s = (layer, now_s), self._pass_s
        return step

    def resumed(self, step: TrackedStep) -> None:
        """Record that this pass resumes a suspended step."""
        step.learn(suspensions=step.record.result.suspensions + 1)
        self._resumed = step

    def dropped(self, step: TrackedStep, rids: Sequence[str], now_s: float) -> StepRecord:
        """Return the record of a suspended step that is dropped.

        ``now_s`` is the time of this rank.
        """
        step.goes_on(now_s)
        result = step.record.result
        # What it ran is lost, and not known before the device has told.
        seconds = None if step.untimed_parts else result.seconds
        lost = StepResult(result.step, result.started_s, seconds, dropped=tuple(rids))
        known = [(self._requests.get(rid), prompt) for rid, prompt in step.prompts.items()]
        requests = [
            StepRequest(
                live.info, None, live.last_result_s, *prompt[:2], reception=prompt.reception
            )
            for live, prompt in known
            if live is not None
        ]
        return replace(step.record, result=lost, offline=tuple(requests))

    def stopped(self) -> None:
        """Record that the oldest pending batch has no results: it was suspended."""
        self._processed.append(_Processed(self._running.popleft()))

    def processed(self, reqs: Sequence[Req], now_s: float) -> None:
        """Record that SGLang has processed the results of the oldest pending batch. O(requests).

        Args:
            reqs: The requests of the batch; the sequence must not change.
            now_s: The time of this rank.
        """
        tokens = [len(req.output_ids) for req in reqs]
        self._processed.append(_Processed(self._running.popleft(), reqs, tokens, now_s))

    def _note_round(self, now_s: float) -> None:
        """Set the duration of the current micro-batch's last step, and what overlapped with it."""
        passes, before = list(self._last), self._micro_batches - 1
        place = len(passes) - self._micro_batches
        step = passes[place] if place >= 0 else None
        if step is None:
            return
        batches = [StepStats() if other is None else other.record.result.batch for other in passes]
        nothing = [StepStats()] * (before - place)
        step.untimed_parts = 0
        step.learn(overlapping=(*nothing, *batches[:place], *batches[place + 1 :]))
        result = step.record.result
        seconds = now_s - result.started_s
        if not result.batch.is_empty and seconds > 0:
            step.learn(seconds=seconds)

    def _note_results(self, processed: _Processed, now_s: float) -> None:
        """Note the requests of a step and their tokens, which came at ``now_s``. O(requests).

        Runs for every request of every step, so it calls nothing for a decode.
        """
        step, reqs, output_tokens, ended_s = processed
        known, prompts = self._requests.by_rid, step.prompts
        online: list[StepRequest] = []
        offline: list[StepRequest] = []
        first: list[StepRequest] = []
        served: list[ServedRequest] = []
        tokens_of: dict[str | None, int] = {}
        new = tuple.__new__  # What StepRequest() does, at half its cost.
        prompt, again = _NO_PROMPT, 0
        for req, num_tokens in zip(reqs, output_tokens, strict=True):
            live = known.get(req.rid)
            if live is None or live.req is not req:
                continue  # It was aborted meanwhile, and another one may have its rid.
            info, last_s = live.info, live.last_result_s
            has_token = num_tokens > live.output_tokens
            if has_token:
                live.output_tokens = num_tokens
                live.last_token_s, live.last_result_s = now_s, ended_s
            if prompts:
                prompt = prompts.get(info.rid, _NO_PROMPT)
                again = live.note_prefill(prompt.context_tokens, prompt.tokens)
            tokens, context_tokens, reception = prompt
            is_last = req.finished_reason is not None
            token_s = ended_s if has_token else None
            values = (info, token_s, last_s, tokens, context_tokens, again, reception, is_last)
            request = new(StepRequest, values)
            if live.is_online:
                online.append(request)
                served.append(new(ServedRequest, (info, now_s if has_token else None)))
            else:
                offline.append(request)
                tokens_of[info.job] = tokens_of.get(info.job, 0) + (tokens or 1)
            if last_s is None and has_token:
                live.first_token_s = now_s
                first.append(request)
            if is_last:
                self._ended.append(req)
        step.has_results = True
        result = step.record.result
        if result.batch.is_empty:
            tokens_of.clear()
        jobs = tuple([JobTokens(job, tokens) for job, tokens in tokens_of.items()])
        step.note(
            result=replace(result, served=tuple(served), jobs=jobs),
            ended_s=ended_s,
            online=tuple(online),
            offline=tuple(offline),
            first=tuple(first),
        )


def _content(
    batch: ScheduleBatch | None,
) -> tuple[ForwardKind | None, StepStats, tuple[PrefillChunk, ...]]:
    """Return the kind of a batch that is ready to run, the sums over it, and its prefills."""
    kind = kind_of(batch) if batch else None
    if batch is None or kind is None:
        return None, StepStats(), ()
    prefills = () if kind is ForwardKind.DECODE else prefilled(batch)
    lens = batch.extend_lens if prefills else ()
    chunks = [PrefillChunk(req.rid, tokens) for req, tokens in zip(prefills, lens, strict=False)]
    return kind, stats_of(batch, kind), tuple(chunks)
