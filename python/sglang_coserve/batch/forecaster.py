"""Learns the rate of offline work and the errors of forecasts, and keeps both on the disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sglang_coserve.batch.forecast_errors import ForecastErrors, PastJob
from sglang_coserve.batch.headroom import Headroom, headroom, required_tokens_per_s
from sglang_coserve.batch.job_forecast import JobForecast, job_forecasts
from sglang_coserve.batch.rate_forecast import HOUR_S, REMEMBERED_HOURS, RateForecast, ServedTokens
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.store import Store, forecast_rows
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.clock import Clock

__all__ = ["Forecaster"]

_WRITE_INTERVAL_S: Final = 60.0
"""How often the history is written; a crash costs as much of it."""


class Forecaster:
    """Forecasts when batches will be complete, from earlier ones."""

    def __init__(self, backend: Backend, store: Store, clock: Clock) -> None:
        self._backend = backend
        self._store = store
        self._clock = clock
        self._errors = ForecastErrors()
        self._took_tokens = 0.0
        self._expected_tokens = 0.0
        self._hours: dict[int, ServedTokens] = {}
        self._unwritten: set[int] = set()
        self._counted = ServedTokens()
        self._written_s = clock.now_s()

    async def load(self) -> None:
        """Read the history of earlier runs.

        Raises:
            StorageError: the database cannot be read.
        """
        self._hours = await self._store.run(forecast_rows.hours)
        await self._store.run(forecast_rows.void_unfinished)
        for past, tokens, expected in await self._store.run(forecast_rows.past):
            self._note(past, tokens, expected)
        self._counted = self._totals()

    def job_forecasts(self, batches: Iterable[JobRecord]) -> dict[str, JobForecast]:
        """Return the forecasts of ``batches``, by id; no other batches are served."""
        now_s = self._clock.now_s()
        return job_forecasts(batches, self._rate(now_s), now_s, self._errors, self._token_bias)

    def headroom(self, batches: Iterable[JobRecord]) -> Headroom:
        """Return the headroom beside ``batches``; no other batches are served."""
        now_s = self._clock.now_s()
        required_per_s = required_tokens_per_s(batches, now_s, self._token_bias)
        recent_per_s = self._backend.load().offline_tokens_per_s
        return headroom(self._rate(now_s), recent_per_s, required_per_s, now_s)

    @property
    def _token_bias(self) -> float:
        if self._took_tokens and self._expected_tokens:
            return self._took_tokens / self._expected_tokens
        return 1.0

    def _rate(self, now_s: float) -> RateForecast | None:
        recent_per_s = self._backend.load().offline_tokens_per_s
        return RateForecast(recent_per_s, now_s, self._hours) if recent_per_s else None

    def ended(self, batch: JobRecord) -> None:
        """Compare a batch in a final state with its forecast, if it is complete and had one."""
        if batch.status is not Status.COMPLETED or batch.forecast_s is None:
            return
        assert batch.completed_at_s is not None
        past = PastJob(batch.forecast_s, batch.completed_at_s - batch.created_at_s)
        self._note(past, batch.progress.usage.total_tokens, batch.progress.estimated_tokens)

    async def look(self) -> None:
        """Count what was served since the last look; write it down now and then.

        Raises:
            StorageError: the database cannot be written.
        """
        totals, now_s = self._totals(), self._clock.now_s()
        tokens = totals.tokens - self._counted.tokens
        busy_s = totals.busy_s - self._counted.busy_s
        self._counted = totals
        if busy_s > 0:
            hour = int(now_s // HOUR_S)
            self._hours[hour] = self._hours.get(hour, ServedTokens()) + ServedTokens(tokens, busy_s)
            self._unwritten.add(hour)
        if now_s - self._written_s >= _WRITE_INTERVAL_S:
            await self.write()

    async def write(self) -> None:
        """Write down what was counted.

        Raises:
            StorageError: the database cannot be written.
        """
        now_s = self._clock.now_s()
        self._written_s = now_s
        if not self._unwritten:
            return
        oldest = int(now_s // HOUR_S) - REMEMBERED_HOURS
        self._hours = {hour: each for hour, each in self._hours.items() if hour >= oldest}
        written = {hour: self._hours[hour] for hour in self._unwritten if hour >= oldest}
        self._unwritten.clear()
        try:
            await self._store.run(forecast_rows.put_hours, written, oldest)
        except BaseException:
            self._unwritten.update(written)
            raise

    def _note(self, past: PastJob, tokens: float, expected: float) -> None:
        self._errors.add(past)
        self._took_tokens += tokens
        self._expected_tokens += expected

    def _totals(self) -> ServedTokens:
        load = self._backend.load()
        return ServedTokens(load.total_tokens, load.busy_s)
