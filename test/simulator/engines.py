"""Builders that let a simulator test read as a scenario."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.offline_queue import pack_tokens
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.prefix_tree import PrefixTree
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.observer import SimulationObserver
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.run import SimulationSetup

MS_PER_TOKEN = PolynomialModel.of(compute_token_s=1e-3)
"""An step takes one millisecond a token, nothing else."""

_serials = itertools.count()


def sim_request(
    rid: str,
    request_class: RequestClass,
    prompt: int | list[int],
    output_tokens: int,
    arrival_s: float = 0.0,
) -> SimRequest:
    """A request with the given token ids, or with so many that no other has."""
    serial = next(_serials) if isinstance(prompt, int) else 0
    token_ids = [serial * 100_003 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    info = RequestInfo(rid, request_class, len(token_ids), output_tokens, arrival_s)
    return SimRequest(info, output_tokens, lambda: pack_tokens(token_ids), serial)


def online(
    rid: str, prompt: int | list[int], output_tokens: int, arrival_s: float = 0.0
) -> SimRequest:
    return sim_request(rid, RequestClass.ONLINE, prompt, output_tokens, arrival_s)


def offline(
    rid: str, prompt: int | list[int], output_tokens: int, arrival_s: float = 0.0
) -> SimRequest:
    return sim_request(rid, RequestClass.OFFLINE, prompt, output_tokens, arrival_s)


def engine_of(
    *requests: SimRequest,
    policy: str = "conserve",
    targets: SloTargets | None = None,
    config: ExecutorConfig | None = None,
    model: LatencyModel = MS_PER_TOKEN,
    scheduler_config: SchedulerConfig | None = None,
    policy_settings: Mapping[str, float] | None = None,
    observers: Sequence[SimulationObserver] = (),
) -> SimEngine:
    """An engine before these requests arrive."""
    config = config or ExecutorConfig(kv_capacity_tokens=10_000, page_tokens=1)
    scheduler_config = scheduler_config or SchedulerConfig()
    setup = SimulationSetup(model, config, targets or SloTargets(), scheduler=scheduler_config)
    ordered = sorted(requests, key=lambda request: request.info.arrival_s)
    return setup.make_engine(
        make_policy(policy, policy_settings or {}), TrafficSource([ordered]), observers
    )


def run_out(engine: SimEngine) -> None:
    """Step until nothing is left, checking the invariants between the steps."""
    while engine.step():
        check_executor(engine.executor)


def check_executor(executor: SimulatedExecutor) -> None:
    """Assert the conservation of KV and of each running request's tokens. O(all)."""
    kv = executor.kv
    check_cache(kv.cache)
    assert kv.free_pages >= 0
    holders = [*executor.admitted.values(), *executor._ended]
    private = sum(
        kv.pages_of(r.computed_tokens) - r.locked_tokens // kv.page_tokens for r in holders
    )
    private += executor.suspended.opened_pages if executor.suspended else 0
    private += executor.host.pages
    assert kv.private_pages == private, f"{kv.private_pages} private pages, {private} used"
    for request in (*holders, *executor.waiting, *executor.offline_waiting.values()):
        kept = request.worked_tokens + request.given_tokens + request.reloaded_tokens
        assert request.computed_tokens == kept - request.lost_tokens, request.info.rid
        assert request.locked_tokens <= request.computed_tokens <= request.length_tokens
        assert request.recomputed_tokens <= request.lost_tokens
    assert executor.num_online == sum(r.info.is_online for r in executor.admitted.values())
    away = executor.suspended.requests if executor.suspended else []
    snapshot = executor.snapshot(0.0)
    for request in executor.admitted.values():
        assert request.state is not RequestState.WAITING
        assert not request.state.is_final
        assert request.computed_tokens > 0 or request in away
        shared = kv.cache.shared_tokens(request.lock) if request.lock else 0
        assert request.view.cached_tokens == (shared if request.computed_tokens else 0)
    slots = snapshot.free_kv_tokens + snapshot.evictable_kv_tokens + kv.held_tokens
    assert slots == kv.capacity_pages * kv.page_tokens


def check_cache(cache: PrefixTree) -> None:
    """Assert that the sums match the tree and locks never grow downwards. O(nodes)."""
    nodes, stack = [], list(cache.root.children.values())
    while stack:
        nodes.append(stack.pop())
        stack.extend(nodes[-1].children.values())
    assert cache.total_tokens == sum(node.edge_tokens for node in nodes)
    assert cache.evictable_tokens == sum(node.edge_tokens for node in nodes if not node.locks)
    for node in nodes:
        assert node.edge and len(node.edge) % cache._page_bytes == 0
        assert node.parent is not None
        assert node.depth_tokens == node.parent.depth_tokens + node.edge_tokens
        assert node.parent is cache.root or node.parent.locks >= node.locks
        assert node.parent.children[node.edge[: cache._page_bytes]] is node
