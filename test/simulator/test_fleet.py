"""Many simulated engines under the gateway's placement."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.engine_load import Pool
from sglang_coserve.core.latency_model.linear import CONSERVE, LinearModel
from sglang_coserve.core.offline_queue import OfflineQueue
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.fleet import Fleet, FleetEngine, Mailbox
from sglang_coserve.simulator.fleet_run import strict_engine
from sglang_coserve.simulator.request import SimRequest
from simulator.engines import offline, online

MODEL = LinearModel.of(CONSERVE, compute_token_s=1e-4, iteration_s=5e-3)
KV_TOKENS, REQUESTS, SHARED, OWN, OUTPUT = 3_000, 16, 160, 16, 20


def engine_of(arriving: Sequence[SimRequest] = ()) -> FleetEngine:
    config = ExecutorConfig(KV_TOKENS, page_tokens=16, max_running_requests=REQUESTS)
    executor, policy = SimulatedExecutor(config, MODEL), make_policy("conserve")
    mailbox = Mailbox(arriving)
    queue = OfflineQueue(policy.queue_config(0))
    scheduler = Scheduler(policy, MODEL, deadlines(SloTargets(ttft_s=0.5)), queue)
    return FleetEngine(SimEngine(scheduler, executor, mailbox, [mailbox]), executor, mailbox)


def grouped_lines(groups: int, members: int) -> list[SimRequest]:
    """In the order of a batch: those with a common beginning together."""
    lines = []
    for group in range(groups):
        head = [group * 1_000 + n for n in range(SHARED)]
        for member in range(members):
            tail = [1_000_000 + (group * members + member) * OWN + n for n in range(OWN)]
            lines.append(offline(f"{group}-{member}", head + tail, OUTPUT))
    return lines


def served(num_engines: int) -> tuple[float, float]:
    """The lines a second, and the part of the prompts found in caches."""
    lines = grouped_lines(40, 12)
    fleet = Fleet([engine_of() for _ in range(num_engines)], lines)
    while fleet.step():
        pass
    assert fleet.num_ended == len(lines)
    assert all(line.state is RequestState.FINISHED for line in lines)
    cached = sum(line.cached_prompt_tokens for line in lines)
    return len(lines) / fleet.now_s, cached / (len(lines) * (SHARED + OWN))


def test_engines_add_up_and_find_the_prefixes_that_one_finds() -> None:
    one_per_s, one_found = served(1)
    for num_engines in (2, 3):
        per_s, found = served(num_engines)
        assert per_s > 0.8 * num_engines * one_per_s
        assert found > 0.95 * one_found


def test_the_same_run_again_is_the_same() -> None:
    assert served(3) == served(3)


def test_lines_go_where_online_requests_leave_time() -> None:
    rng = random.Random(1)
    busy = [online(f"on-{n}", 400, 40, arrival_s=0.05 * n + rng.random() * 0.02) for n in range(80)]
    lines = [offline(f"{n}", 64, 32) for n in range(300)]
    fleet = Fleet([engine_of(busy), engine_of()], lines)
    while fleet.step():
        pass
    assert all(line.state is RequestState.FINISHED for line in lines)
    assert all(request.state is RequestState.FINISHED for request in busy)
    shares = [
        sum(not request.info.is_online for request in each.engine.requests)
        for each in fleet.engines
    ]
    assert sum(shares) == len(lines)
    assert shares[1] > shares[0]


def test_a_line_that_no_engine_can_hold_holds_up_no_other() -> None:
    lines = [offline("large", KV_TOKENS + 1, 1), *(offline(f"{n}", 32, 4) for n in range(5))]
    fleet = Fleet([engine_of(), engine_of()], lines)
    while fleet.step():
        pass
    assert fleet.num_ended == len(lines)
    assert [line.state for line in lines[1:]] == [RequestState.FINISHED] * 5


def pool_engine(pool: Pool, kv_tokens: int, arriving: Sequence[SimRequest] = ()) -> FleetEngine:
    config = ExecutorConfig(kv_tokens, page_tokens=16, max_running_requests=REQUESTS)
    executor, policy = SimulatedExecutor(config, MODEL), make_policy("ooco")
    queue = OfflineQueue(policy.queue_config(0))
    scheduler = Scheduler(policy, MODEL, deadlines(SloTargets(ttft_s=0.5, tpot_s=0.05)), queue)
    if pool == "strict":
        return strict_engine(scheduler, executor, Mailbox(arriving))
    mailbox = Mailbox(arriving)
    engine = SimEngine(scheduler, executor, mailbox, [mailbox])
    return FleetEngine(engine, executor, mailbox, "relaxed")


@pytest.mark.parametrize("strict_kv_tokens", [400, KV_TOKENS])
def test_lines_begin_at_relaxed_engines_and_end_wherever_there_is_room(
    strict_kv_tokens: int,
) -> None:
    requests = [online(f"on-{n}", 200, 10, arrival_s=0.05 * n) for n in range(60)]
    lines = [offline(f"{n}", 32 + 8 * (n % 7), 100) for n in range(200)]
    engines = [pool_engine("relaxed", KV_TOKENS) for _ in range(2)]
    engines += [pool_engine("strict", strict_kv_tokens, requests[turn::2]) for turn in range(2)]
    fleet = Fleet(engines, lines, link_tokens_per_s=1e4)
    while fleet.step():
        for each in fleet.engines:
            each.executor.check_invariants()
    assert fleet.num_ended == len(lines)
    assert all(line.state is RequestState.FINISHED for line in lines)
    assert all(request.state is RequestState.FINISHED for request in requests)
    assert fleet.lines_pulled > 0
    if strict_kv_tokens < KV_TOKENS:
        assert fleet.lines_returned > 0
    began = {id(r) for each in fleet.engines[:2] for r in each.engine.requests}
    assert began >= {id(line) for line in lines}
    assert all(not r.info.is_online for each in fleet.engines[:2] for r in each.engine.requests)
    decoded = [each.engine.counters.offline_tokens for each in fleet.engines]
    assert sum(decoded[2:]) > 0
    for each in fleet.engines:
        assert each.executor.pool.held_tokens == 0
