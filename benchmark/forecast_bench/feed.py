"""The Batch API's part in a simulation: feeds lines, measures rates, makes forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from forecast_bench.batches import ForecastLine, SimBatch
from sglang_coserve.batch.forecast_errors import FinishEstimate, ForecastErrors, PastJob
from sglang_coserve.batch.job_forecast import job_forecasts
from sglang_coserve.batch.rate_forecast import HOUR_S, RateForecast, ServedTokens
from sglang_coserve.batch.token_rate import TokenRate
from sglang_coserve.lines.fair_slots import SlotShare
from sglang_coserve.simulator.observer import RequestEvent, StepRecord
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.source import TrafficSource

__all__ = ["Feed", "Judged"]

_MAX_IN_FLIGHT = 512
"""As by default."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A batch, what was said of it when it was admitted, and what came of it."""

    number: int
    lines: int
    arrival_s: float
    forecast_s: float
    finish: FinishEstimate
    by_last_minute: FinishEstimate
    """The same from the rate of the last minute alone."""

    actual_s: float


class Feed(TrafficSource):
    """A source of requests, and an observer of what becomes of them."""

    def __init__(
        self, online: Iterable[SimRequest], batches: Iterator[SimBatch], expected_per_s: float
    ) -> None:
        super().__init__([online])
        self.now_s: Callable[[], float] = lambda: 0.0
        """Of the engine."""

        self.judged: list[Judged] = []
        self._batches = batches
        self._coming = next(batches, None)
        self._running: list[SimBatch] = []
        self._lines: dict[str, tuple[SimBatch, ForecastLine]] = {}
        self._owners: dict[str, SlotShare] = {}
        self._rate = TokenRate(lambda: self.now_s(), expected_per_s=expected_per_s)
        self._work = self._rate.in_flight()
        self._hours: dict[int, ServedTokens] = {}
        self._counted = ServedTokens()
        self._errors, self._minute_errors = ForecastErrors(), ForecastErrors()
        self._admitted: dict[int, tuple[float, FinishEstimate, float, FinishEstimate]] = {}
        self._took = self._expected = 0.0
        self._is_working = False

    @property
    def next_arrival_s(self) -> float:
        """See ``TrafficSource``; a batch is an arrival, too."""
        coming_s = math.inf if self._coming is None else self._coming.arrival_s
        return min(super().next_arrival_s, coming_s)

    def arrived(self, until_s: float) -> Iterator[SimRequest]:
        """See ``TrafficSource``."""
        while self._coming is not None and self._coming.arrival_s <= until_s:
            self._admit(self._coming)
            self._coming = next(self._batches, None)
        return super().arrived(until_s)

    def refill(self, _num_waiting: int, _num_running: int, now_s: float) -> Iterator[SimRequest]:
        """Send lines, of the owner and the batch that were served least."""
        while len(self._lines) < _MAX_IN_FLIGHT:
            waiting = [batch for batch in self._running if batch.unsent]
            if not waiting:
                return
            batch = min(
                waiting,
                key=lambda b: (
                    self._owners[b.owner].taken_per_weight,
                    b.owner,
                    b.share.taken_per_weight,
                ),
            )
            line = batch.unsent.popleft()
            request = line.request(batch.number)
            request.arrive_at(now_s)
            request.expected_output_tokens = batch.lengths.expected(line.limit_tokens)
            self._lines[request.info.rid] = batch, line
            for share in (batch.share, self._owners[batch.owner]):
                share.begin(line.estimated_tokens)
            yield request

    def on_request(self, now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``Observer``."""
        if event is not RequestEvent.FINISHED or request.info.is_online:
            return
        batch, line = self._lines.pop(request.info.rid)
        tokens = line.prompt_tokens + line.output_tokens
        self._rate.add(tokens)
        for share in (batch.share, self._owners[batch.owner]):
            share.end(line.estimated_tokens, tokens)
        batch.lengths.add(line.limit_tokens, line.output_tokens)
        batch.completed += 1
        batch.took_tokens += tokens
        batch.estimated_done_tokens += line.estimated_tokens
        if batch.is_complete:
            self._running.remove(batch)
            self._judge(batch, now_s)
            if not self._running:
                self._count()
                self._work.__exit__(None, None, None)
                self._is_working = False

    def on_step(self, record: StepRecord) -> None:
        """See ``Observer``: nothing is learned from it."""

    def _admit(self, batch: SimBatch) -> None:
        # The service looks once a second; between two admissions nobody asks.
        self._count()
        if not self._is_working:
            self._work = self._rate.in_flight()
            self._work.__enter__()
            self._is_working = True
        owner = self._owners.setdefault(batch.owner, SlotShare())
        others = [each for each in self._running if each.owner == batch.owner]
        batch.share.level(each.share for each in others)
        if not others:
            owner.level(self._owners[each.owner] for each in self._running)
        self._running.append(batch)
        recent_per_s = self._rate.per_s()
        assert recent_per_s is not None
        forecast_s = self._forecast(batch, RateForecast(recent_per_s, batch.arrival_s, self._hours))
        minute_s = self._forecast(batch, RateForecast(recent_per_s, batch.arrival_s))
        self._admitted[batch.number] = (
            forecast_s,
            self._errors.finish(forecast_s),
            minute_s,
            self._minute_errors.finish(minute_s),
        )

    def _forecast(self, batch: SimBatch, rate: RateForecast) -> float:
        bias = self._took / self._expected if self._took else 1.0
        records = [each.record() for each in self._running]
        found = job_forecasts(records, rate, batch.arrival_s, self._errors, bias)
        forecast_s = found[str(batch.number)].forecast_s
        assert forecast_s is not None
        return forecast_s

    def _judge(self, batch: SimBatch, now_s: float) -> None:
        forecast_s, finish, minute_s, minute = self._admitted.pop(batch.number)
        actual_s = now_s - batch.arrival_s
        self._errors.add(PastJob(forecast_s, actual_s))
        self._minute_errors.add(PastJob(minute_s, actual_s))
        self._took += batch.took_tokens
        self._expected += batch.estimated_tokens
        self.judged.append(
            Judged(
                batch.number,
                len(batch.lines),
                batch.arrival_s,
                forecast_s,
                finish,
                minute,
                actual_s,
            )
        )

    def _count(self) -> None:
        """Note what was served since the last look, as ``batch.forecaster`` does."""
        totals = ServedTokens(self._rate.total_tokens, self._rate.busy_s)
        hour = int(self.now_s() // HOUR_S)
        served = ServedTokens(
            totals.tokens - self._counted.tokens, totals.busy_s - self._counted.busy_s
        )
        self._hours[hour] = self._hours.get(hour, ServedTokens()) + served
        self._counted = totals
