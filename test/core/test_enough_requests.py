"""How many offline requests are worth the KV that they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.offline_queue.offline_requests import offline
from core.scheduler.scenarios import MODEL
from sglang_coserve.core.bottleneck import enough_requests
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.learned_times import OfflineShape
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import JobTokens, PrefillChunk, ServedRequest, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.simulator.assemble import SimulatedMachine

H100 = SimulatedMachine.named("llama-3.1-8b", "h100").roofline()
NOTHING = StepStats()


def step_s(
    model: LatencyModel, beside: StepStats, prompt: float, output: float, count: int
) -> float:
    """The time of a step of so many requests, each as far as its middle, and their successors."""
    batch = beside.with_decodes(count, count * round(prompt + output / 2))
    tokens = round(count * prompt / max(output, 1.0))
    return model.predict(batch.with_prefill(tokens, 0) if tokens else batch)


@given(
    model=st.sampled_from([MODEL, H100]),
    decodes=st.integers(0, 50),
    prompt=st.floats(1, 20_000),
    output=st.floats(0, 4_000),
    budget_s=st.floats(0.001, 2.0),
    most=st.integers(1, 300),
)
def test_they_fit_the_budget_and_have_nine_tenths_of_the_throughput(
    model: LatencyModel, decodes: int, prompt: float, output: float, budget_s: float, most: int
) -> None:
    beside = StepStats().with_decodes(decodes, 1000 * decodes)

    def seconds(count: int) -> float:
        return step_s(model, beside, prompt, output, count)

    enough = enough_requests(model, beside, prompt, output, budget_s, most)
    fitting = [count for count in range(1, most + 1) if seconds(count) <= budget_s]
    if not fitting:
        assert enough == 1, "one that does not fit still has to run at some time"
        return
    assert enough in fitting
    # Prompts have whole tokens, so the throughput of a few requests may be a little off.
    fewest = 0.9 * fitting[-1] / seconds(fitting[-1])
    assert enough / seconds(enough) >= fewest * (1 - 1e-9)
    if enough > 1 and (enough - 1) * prompt / max(output, 1.0) >= 50:
        assert (enough - 1) / seconds(enough - 1) < fewest * 1.02


@given(
    model=st.sampled_from([MODEL, H100]),
    prompt=st.integers(1, 20_000),
    output=st.integers(1, 4_000),
    budgets_s=st.tuples(st.floats(0.001, 2.0), st.floats(0.001, 2.0)).map(sorted),
)
def test_a_longer_budget_is_never_for_fewer_of_those_that_share_a_fixed_cost(
    model: LatencyModel, prompt: int, output: int, budgets_s: list[float]
) -> None:
    short, long = (
        enough_requests(model, NOTHING, prompt, output, budget_s, 300) for budget_s in budgets_s
    )
    # Attention makes the work of very long steps grow faster than their requests.
    is_shared = all(
        step_s(model, NOTHING, prompt, output, 2 * count)
        <= 2 * step_s(model, NOTHING, prompt, output, count)
        for count in range(1, 151)
    )
    if is_shared:
        assert short <= long + 1


@pytest.mark.parametrize(
    ("budget_s", "enough"),
    # 9,900 requests fit a second, 101 fit 20.1 ms. Nine tenths of their 9,900 and 5,025 tokens/s
    # come from 818 requests in 91.8 ms and from 83 in 18.3 ms.
    [(1.00001, 818), (0.0201, 83)],
)
def test_more_decodes_are_not_worth_their_kv_once_the_fixed_cost_is_small(
    budget_s: float, enough: int
) -> None:
    """A step takes 10 ms and 0.1 ms for each request."""
    model = PolynomialModel.of(compute_token_s=1e-4, iteration_s=0.010)
    assert enough_requests(model, NOTHING, 0.0, 1000.0, budget_s, 10**5) == enough


@pytest.mark.parametrize(
    ("online_decodes", "enough"),
    # 20 and 10 fit; 15 in 25 ms and 9 in 29 ms have more than nine tenths of their throughput.
    [(0, 15), (100, 9)],
)
def test_prompts_behind_the_decodes_count(online_decodes: int, enough: int) -> None:
    """Each decode of a request of 900 + 100 tokens comes with 9 prompt tokens: 1 ms in all."""
    model = PolynomialModel.of(compute_token_s=1e-4, iteration_s=0.010)
    beside = StepStats().with_decodes(online_decodes, 0)
    assert enough_requests(model, beside, 900.0, 100.0, 0.0301, 300) == enough


def test_one_is_enough_where_none_fits_or_one_fills_a_step() -> None:
    assert enough_requests(H100, NOTHING, 100_000.0, 1.0, 0.001, 300) == 1
    assert enough_requests(H100, NOTHING, 8_000.0, 1.0, 10.0, 300) == 1
    assert enough_requests(MODEL, NOTHING, 100.0, 100.0, 10.0, 1) == 1


# --- Lengths of offline requests ----------------------------------------------------------

NEXT = offline("next", range(300))
EXPECTED = NEXT.expected_tokens_left


def result(prompt_tokens: int, online_tokens: int = 0) -> StepResult:
    """A step with so many prompt tokens, some of an online request."""
    info = RequestInfo("online", RequestClass.ONLINE, 10**6, 1, 0.0)
    chunks = (PrefillChunk("online", online_tokens),) if online_tokens else ()
    return StepResult(
        step=0,
        started_s=0.0,
        seconds=0.01,
        batch=StepStats.of(prefills=[(prompt_tokens, 0)]),
        chunks=chunks,
        served=(ServedRequest(info, None),) if online_tokens else (),
        jobs=(JobTokens(None, prompt_tokens - online_tokens),),
    )


def served(shape: OfflineShape, *lengths: tuple[int, int]) -> None:
    """Serve offline requests of these computed prompt tokens and output tokens."""
    for prompt_tokens, output_tokens in lengths:
        shape.started()
        shape.computed(result(prompt_tokens))
        shape.ended(output_tokens)


def test_until_one_has_ended_lengths_are_those_of_the_next_request() -> None:
    shape = OfflineShape()
    assert shape.mean_tokens(NEXT) == (300, EXPECTED)
    shape.started()
    shape.computed(result(100))
    assert shape.mean_tokens(NEXT) == (300, EXPECTED)


def test_lengths_are_means_of_what_was_computed() -> None:
    shape = OfflineShape()
    served(shape, (100, 10), (300, 30))
    prompt_tokens, output_tokens = shape.mean_tokens(NEXT)
    assert prompt_tokens == pytest.approx(200, rel=0.02)
    assert output_tokens == 20


def test_tokens_of_online_prompts_are_not_counted() -> None:
    shape = OfflineShape()
    shape.started()
    shape.computed(result(1000, online_tokens=900))
    shape.computed(result(500, online_tokens=500))
    shape.ended(10)
    assert shape.mean_tokens(NEXT)[0] == 100


def test_lengths_follow_the_last_requests() -> None:
    shape = OfflineShape()
    served(shape, *[(4000, 100)] * 500, *[(200, 1000)] * 300)
    prompt_tokens, output_tokens = shape.mean_tokens(NEXT)
    assert prompt_tokens == pytest.approx(200, rel=0.2)
    assert output_tokens == pytest.approx(1000, rel=0.02)


def test_cached_prompts_count_as_far_as_they_were_computed() -> None:
    """4,000 tokens of which 3,900 are shared: what takes time is the rest."""
    shape = OfflineShape()
    served(shape, (4000, 50), *[(100, 50)] * 500)
    assert shape.mean_tokens(NEXT)[0] == pytest.approx(100, rel=0.02)
