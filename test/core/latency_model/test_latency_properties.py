"""What holds for every model, whatever its coefficients and however odd the batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latency_cases import MACHINES, BatchLengths, any_batch, machine_id, models

from sglang_coserve.core.latency_model.model import LatencyModel, Sample, SampleTable
from sglang_coserve.core.step_stats import StepStats

more = st.integers(1, 50_000)


@st.composite
def grown(draw: st.DrawFn) -> tuple[BatchLengths, BatchLengths]:
    """A batch, and the same batch with one request added or enlarged."""
    before: BatchLengths = draw(any_batch)
    ways = ["new prefill", "new decode"]
    ways += ["longer chunk", "deeper chunk"] if before.prefills else []
    ways += ["deeper decode"] if before.decodes else []
    prefills, decodes = list(before.prefills), list(before.decodes)
    match draw(st.sampled_from(ways)):
        case "new prefill":
            prefills.append((draw(more), draw(more)))
        case "new decode":
            decodes.append(draw(more))
        case "longer chunk":
            prefills[0] = (prefills[0][0] + draw(more), prefills[0][1])
        case "deeper chunk":
            prefills[0] = (prefills[0][0], prefills[0][1] + draw(more))
        case "deeper decode":
            decodes[0] += draw(more)
    return before, BatchLengths(tuple(prefills), tuple(decodes))


@settings(deadline=None)
@given(models(), grown())
def test_more_work_is_never_predicted_to_take_less_time(
    model: LatencyModel, batches: tuple[BatchLengths, BatchLengths]
) -> None:
    before, after = batches
    assert 0 <= model.predict(before.stats) <= model.predict(after.stats) < math.inf


@settings(deadline=None)
@given(models())
def test_nothing_takes_no_time(model: LatencyModel) -> None:
    assert model.predict(StepStats()) == 0


@settings(deadline=None)
@given(models(), any_batch.filter(lambda batch: not batch.stats.is_empty))
def test_contributions_sum_to_the_prediction(model: LatencyModel, batch: BatchLengths) -> None:
    parts = model.contributions(SampleTable.of([Sample(batch.stats, 1.0)]))
    assert parts.shape == (1, len(model.coefficients))
    assert (parts >= 0).all()
    assert parts.sum() == pytest.approx(model.predict(batch.stats), rel=1e-9)


def assert_longest(
    model: LatencyModel, batch: StepStats, context: int, limit: int, budget_s: float
) -> int:
    tokens = model.max_prefill_tokens(batch, context, limit, budget_s)
    assert 0 <= tokens <= limit
    if tokens > 0:
        assert model.predict(batch.with_prefill(tokens, context)) <= budget_s
    if tokens < limit:
        assert model.predict(batch.with_prefill(tokens + 1, context)) > budget_s
    return tokens


@settings(deadline=None)
@given(
    model=models(),
    batch=any_batch,
    context=st.integers(0, 200_000),
    limit=st.integers(0, 100_000),
    budget_s=st.floats(0, 10),
)
def test_the_chunk_is_the_longest_within_the_budget(
    model: LatencyModel, batch: BatchLengths, context: int, limit: int, budget_s: float
) -> None:
    assert_longest(model, batch.stats, context, limit, budget_s)


@settings(deadline=None)
@given(
    model=models(),
    batch=any_batch,
    context=st.integers(0, 200_000),
    tokens=st.integers(1, 5_000),
    ulps=st.integers(-2, 2),
)
def test_the_chunk_is_exact_when_the_budget_is_tight(
    model: LatencyModel, batch: BatchLengths, context: int, tokens: int, ulps: int
) -> None:
    budget_s = model.predict(batch.stats.with_prefill(tokens, context))
    budget_s = max(0.0, budget_s + ulps * math.ulp(budget_s))
    found = assert_longest(model, batch.stats, context, 2 * tokens, budget_s)
    assert found >= tokens or ulps < 0


@pytest.mark.parametrize("model", MACHINES, ids=machine_id)
def test_a_chunk_takes_a_handful_of_predictions(
    model: LatencyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = StepStats.of([(300, 1000)], [900] * 40)
    budget_s = model.predict(batch.with_prefill(1234, 5000))
    calls = []
    predict = type(model).predict

    def counted(self: LatencyModel, stats: StepStats) -> float:
        calls.append(stats)
        return predict(self, stats)

    monkeypatch.setattr(type(model), "predict", counted)
    assert model.max_prefill_tokens(batch, 5000, 100_000, budget_s) == 1234
    assert len(calls) <= 7
