"""The upper bound of offline work: where it is known, and above what policies do."""

from __future__ import annotations

from functools import partial
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bound_bench.upper_bound import Capacity, OfflineShape, Required, offline_bound, required
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.policies import POLICIES, make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.assemble import SimulatedMachine, offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.workload.trace import TraceRequest

MODEL = SimulatedMachine.named("llama-3.1-8b", "h100").roofline()
LARGE = Capacity(batch_tokens=8192, requests=256, kv_tokens=400_000)


def test_without_online_requests_it_is_the_saturated_throughput() -> None:
    # One token a prompt, so nothing decodes: full steps, one after the other.
    model = PolynomialModel.of(compute_token_s=1e-4, iteration_s=2e-3)
    step_s = model.predict(StepStats(prefill_requests=1, prefill_tokens=8192))
    tokens_per_s = 8192 / step_s * 1001 / 1000  # With the token that each prompt gives.
    found = offline_bound(model, LARGE, OfflineShape(1000, 1), Required(), 50.0)
    assert found == pytest.approx(tokens_per_s, rel=1e-6)


def test_decodes_alone_are_bound_by_the_requests_that_fit() -> None:
    model = PolynomialModel.of(iteration_s=1e-2)
    capacity = Capacity(batch_tokens=10**9, requests=256, kv_tokens=10_000)
    # Each holds its prompt for a step, and what its 100 decodes read for one step each.
    kv_of_one = 1000 + sum(range(1001, 1101))
    requests_per_s = 10_000 / kv_of_one / 1e-2
    found = offline_bound(model, capacity, OfflineShape(1000, 101), Required(), 10.0)
    assert found == pytest.approx(1101 * requests_per_s, rel=1e-6)


def test_online_work_takes_its_part_of_the_time() -> None:
    model = PolynomialModel.of(compute_token_s=1e-4, iteration_s=0.0)
    online = Required(prompts=10, prompt_tokens=50_000)
    alone = offline_bound(model, LARGE, OfflineShape(1000, 1), Required(), 10.0)
    beside = offline_bound(model, LARGE, OfflineShape(1000, 1), online, 10.0)
    assert beside == pytest.approx(alone / 2, rel=1e-6)
    too_much = online._replace(prompt_tokens=200_000)
    assert offline_bound(model, LARGE, OfflineShape(1000, 1), too_much, 10.0) == 0.0


def test_different_steps_are_those_of_requests_that_never_meet() -> None:
    targets = SloTargets(ttft_s=1.0, tpot_s=0.1)
    # Each is there for at most 1.9 s; the second meets both others.
    trace = [TraceRequest(index, arrival_s, 100, 10) for index, arrival_s in enumerate((0, 1, 2))]
    online = required(trace, targets)
    assert online.steps == 20
    assert online[:5] == (3, 300, 3 * 5050, 27, 3 * sum(range(101, 110)))
    assert required(trace, targets, late_share=0.34).steps == 10
    # Without targets all could be there at the same time, and have the same work.
    for loose in (SloTargets(), SloTargets(tpot_s=0.1), SloTargets(ttft_s=1.0)):
        assert required(trace, loose) == online._replace(steps=10)
    assert required([], targets) == Required()


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [TraceRequest(index, 0.0, 1500, 1, hash_ids=(1, 2, 3)) for index in range(2)]
    online = required(trace, SloTargets(ttft_s=1.0))
    assert online.prompt_tokens == 1500 + 1


def simulated(
    policy: str, trace: list[TraceRequest], shape: OfflineShape, capacity: Capacity
) -> SimulationResult:
    """Return a run of all requests to their ends, 100 of them offline."""
    offline = offline_requests(
        f"{shape.prompt_tokens}x{shape.output_tokens}", max_context_tokens=10**6
    )
    config = ExecutorConfig(
        kv_capacity_tokens=capacity.kv_tokens,
        max_running_requests=capacity.requests,
        max_batch_tokens=capacity.batch_tokens,
        safepoint=SafepointConfig(32, 4),
    )
    return simulate(
        Workload(
            online=partial(from_trace, trace, RequestClass.ONLINE),
            offline=lambda: islice(offline(), 100),
            backlog_depth=32,
        ),
        SimulationSetup(MODEL, config, SloTargets(0.3, 0.05)),
        make_policy(policy),
    )


lengths = st.tuples(st.integers(1, 4000), st.integers(1, 300))


@settings(deadline=None, max_examples=5)
@given(
    online=st.lists(st.tuples(st.floats(0.0, 3.5), lengths), max_size=20),
    offline=st.tuples(st.integers(100, 4000), st.integers(1, 300)),
    kv_tokens=st.sampled_from([40_000, 400_000]),
    requests=st.sampled_from([16, 256]),
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_does_more(
    policy: str,
    online: list[tuple[float, tuple[int, int]]],
    offline: tuple[int, int],
    kv_tokens: int,
    requests: int,
) -> None:
    """Each beside the targets that it kept itself."""
    trace = [
        TraceRequest(index, arrival_s, *length)
        for index, (arrival_s, length) in enumerate(sorted(online))
    ]
    capacity, shape = Capacity(8192, requests, kv_tokens), OfflineShape(*offline)
    result = simulated(policy, trace, shape, capacity)
    served = [one for one, got in zip(trace, result.online, strict=True) if got.token_times_s]
    ttfts_s = [timeline.ttft_s or 0.0 for timeline in result.online]
    gaps_s = [b - a for t in result.online for a, b in pairwise(t.token_times_s)]
    kept = SloTargets(max(ttfts_s, default=1.0), max(gaps_s, default=1.0))
    bound = offline_bound(MODEL, capacity, shape, required(served, kept), result.interval_s)
    assert result.offline_throughput.computed_tokens_per_s <= bound * (1 + 1e-9)
