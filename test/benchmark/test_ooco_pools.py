"""Two engines: who decodes where, and that nothing is lost between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from paper.ooco_pools import Pools, Pull, length_preference
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.policies.ooco import OocoPolicy, Role
from sglang_coserve.core.request import RequestState
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.run import SimulationSetup
from simulator.engines import check_executor, offline, online

MODEL = PolynomialModel.of(compute_token_s=1e-3, iteration_s=5e-3)
TPOT_S = 0.030


def pools_of(requests: list[SimRequest], strict_kv_tokens: int, pull: Pull) -> Pools:
    def instance(
        role: Role,
        kv_tokens: int,
        arriving: Sequence[SimRequest] = (),
        take_back: Callable[[SimRequest], None] | None = None,
    ) -> SimEngine:
        machine = ExecutorConfig(kv_tokens, page_tokens=4, max_batch_tokens=64)
        setup = SimulationSetup(MODEL, machine, SloTargets(tpot_s=TPOT_S))
        source = TrafficSource([sorted(arriving, key=lambda request: request.info.arrival_s)])
        return setup.make_engine(OocoPolicy(role), source, take_back=take_back)

    relaxed = instance(Role.RELAXED, 400, requests)
    strict = instance(Role.STRICT, strict_kv_tokens, take_back=relaxed.accept)
    return Pools(relaxed, strict, 1e5, pull)


def test_online_decodes_at_the_strict_engine_and_offline_where_it_was_prefilled() -> None:
    first, second = online("n", 10, 5), offline("f", 10, 5)
    pools = pools_of([first, second], 100, lambda _: [])
    while pools.step(10.0):
        pass
    assert first.state is second.state is RequestState.FINISHED
    assert pools.strict.counters.online_tokens == 4
    assert pools.strict.counters.offline_tokens == 0
    # 10 tokens of prefill, its KV on the way for 10 tokens, then 4 decodes.
    assert first.token_times_s[0] == pytest.approx(0.015)
    assert first.token_times_s[-1] == pytest.approx(0.015 + 1e-4 + 4 * 0.006)


def test_the_strict_engine_pulls_offline_work_while_it_has_time() -> None:
    requests = [online("n", 10, 60), *(offline(f"f{i}", 10 + i, 30) for i in range(6))]
    pools = pools_of(requests, 300, length_preference(MODEL, TPOT_S))
    while pools.step(10.0):
        pass
    assert pools.strict.counters.offline_tokens > 0
    assert all(request.state is RequestState.FINISHED for request in requests)


@pytest.mark.parametrize("strict_kv_tokens", [60, 120, 400])
def test_nothing_is_lost_on_the_way(strict_kv_tokens: int) -> None:
    rng = random.Random(strict_kv_tokens)
    requests = [
        rng.choice((online, offline))(
            f"r{i}", rng.randint(1, 30), rng.randint(1, 25), rng.uniform(0, 1)
        )
        for i in range(60)
    ]
    pools = pools_of(requests, strict_kv_tokens, length_preference(MODEL, TPOT_S))
    while pools.step(100.0):
        check_executor(pools.relaxed.executor)
        check_executor(pools.strict.executor)
    assert all(request.state is RequestState.FINISHED for request in requests)
    for executor in (pools.relaxed.executor, pools.strict.executor):
        assert executor.kv.held_tokens == 0
    for request in requests:
        assert request.token_times_s == sorted(request.token_times_s)
        assert len(request.token_times_s) == request.output_tokens
        needed = request.info.prompt_tokens + request.output_tokens - 1
        found = request.given_tokens + request.reloaded_tokens - request.lost_tokens
        assert request.worked_tokens + found == needed
