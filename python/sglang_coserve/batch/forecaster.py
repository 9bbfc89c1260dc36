"""Forecasts when batches will be complete, and learns from how the earlier ones ended."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_coserve.batch.job_forecast import ForecastErrors, JobForecast, PastJob, job_forecasts
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.service_status import Headroom, headroom, required_tokens_per_s
from sglang_coserve.batch.store import Store, batch_rows
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.clock import Clock

__all__ = ["Forecaster"]


class Forecaster:
    """Forecasts when batches will be complete, from earlier ones."""

    def __init__(self, backend: Backend, store: Store, clock: Clock) -> None:
        self._backend = backend
        self._store = store
        self._clock = clock
        self._errors = ForecastErrors()
        self._took_tokens = 0.0
        self._expected_tokens = 0.0

    async def load(self) -> None:
        """Read how the batches of earlier runs ended.

        Raises:
            StorageError: the database cannot be read.
        """
        await self._store.run(batch_rows.void_forecasts)
        for past, tokens, expected in await self._store.run(batch_rows.past_forecasts):
            self._note(past, tokens, expected)

    def job_forecasts(self, batches: Iterable[JobRecord]) -> dict[str, JobForecast]:
        """Return the forecasts of ``batches``, by id; no other batches are served."""
        return job_forecasts(
            batches, self._rate_per_s, self._clock.now_s(), self._errors, self._token_bias
        )

    def headroom(self, batches: Iterable[JobRecord]) -> Headroom:
        """Return the headroom beside ``batches``; no other batches are served."""
        required_per_s = required_tokens_per_s(batches, self._clock.now_s(), self._token_bias)
        return headroom(self._rate_per_s, required_per_s)

    def ended(self, batch: JobRecord) -> None:
        """Compare a batch in a final state with its forecast, if it is complete and had one."""
        if batch.status is not Status.COMPLETED or batch.forecast_s is None:
            return
        assert batch.completed_at_s is not None
        past = PastJob(batch.forecast_s, batch.completed_at_s - batch.created_at_s)
        self._note(past, batch.progress.usage.total_tokens, batch.progress.estimated_tokens)

    @property
    def _token_bias(self) -> float:
        if self._took_tokens and self._expected_tokens:
            return self._took_tokens / self._expected_tokens
        return 1.0

    @property
    def _rate_per_s(self) -> float | None:
        return self._backend.load().offline_tokens_per_s or None

    def _note(self, past: PastJob, tokens: float, expected: float) -> None:
        self._errors.add(past)
        self._took_tokens += tokens
        self._expected_tokens += expected
