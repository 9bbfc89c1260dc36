"""The same loads and systems in the simulator: seconds instead of minutes, no engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Final

from emulated_bench.cases import Case
from emulated_bench.contenders import PLAIN, Contender, pairs, targets_of_alone
from interference_bench.report import in_ms, percentiles_ms
from sglang_coserve.core.control.objective import POLICY_WITH_DEFAULTS, Objective, parse_slowdown
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.policies.baselines import SarathiPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.metrics import SloTargets, attainment, latency_report, throughput
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.workload.trace import TraceRequest

_WARM_UP_S: Final = 3.0
"""Offline requests run before the first online request, as on the emulated device."""

_WAITING: Final = 64
"""Offline requests that wait for those in flight to end: never none."""


def is_simulated(contender: Contender) -> bool:
    """Return whether the simulator has the system: it runs no decodes between chunks."""
    return not contender.has_decodes_between


def simulated_row(
    emulation: Emulation, case: Case, contender: Contender, repeat: int, of_alone: SloTargets
) -> dict[str, Any]:
    """Return the figures of one simulated run.

    Args:
        emulation: Device, with the variation of its step times.
        case: Load.
        contender: System.
        repeat: Seed.
        of_alone: Targets of ``OF_ALONE``; not used for online requests alone.
    """
    has_offline = contender.name != PLAIN
    begin_s = _WARM_UP_S if has_offline else 0.0
    requests = [
        replace(request, arrival_s=begin_s + request.arrival_s) for request in case.requests(repeat)
    ]
    result = simulate(
        Workload(
            partial(from_trace, requests, RequestClass.ONLINE, seed=repeat),
            partial(_offline, case.offline) if has_offline else tuple,
            backlog_depth=_WAITING * has_offline,
            interval_s=begin_s + case.seconds,
        ),
        _setup(emulation, case, contender, repeat, of_alone),
        _policy(contender),
    )
    row = _row(result, begin_s, begin_s + case.seconds)
    if not has_offline:
        of_alone = targets_of_alone(row)
    attained = {name: attainment(result.online, kept) for name, kept in pairs(of_alone).items()}
    return {**row, "attained": attained}


def _offline(lengths: tuple[int, int]) -> Iterable[SimRequest]:
    endless = (TraceRequest(index, 0.0, *lengths) for index in count())
    return from_trace(endless, RequestClass.OFFLINE)


def _policy(contender: Contender) -> Policy:
    """Return the policy; without offline work ours does what plain SGLang does.

    Stock SGLang with mixed chunks and priorities is Sarathi-Serve with two classes: a chunk has the
    step's decodes, too. It is better than stock SGLang in first tokens, since an online prompt goes
    before an offline one that has begun.
    """
    if contender.chunk_tokens is not None:
        return SarathiPolicy(chunk_tokens=contender.chunk_tokens)
    return make_policy(contender.policy or POLICY_WITH_DEFAULTS)


def _setup(
    emulation: Emulation, case: Case, contender: Contender, repeat: int, of_alone: SloTargets
) -> SimulationSetup:
    is_stock = contender.chunk_tokens is not None
    slos = tuple(map(parse_slo, contender.slos(of_alone)))
    slowdown = contender.stream_slowdown and parse_slowdown(contender.stream_slowdown, "streams")
    policy = contender.policy or POLICY_WITH_DEFAULTS
    objective = Objective() if is_stock else Objective.of(policy, slos, None, slowdown or None)
    return SimulationSetup(
        emulation.latency_model(),
        ExecutorConfig(
            emulation.kv_tokens,
            page_tokens=1,
            max_running_requests=_MAX_REQUESTS,
            max_batch_tokens=emulation.chunk_tokens,
            safepoint=None if is_stock else SafepointConfig(emulation.num_layers),
            overlap=True,
            paced=not is_stock,
            noise_cv=emulation.noise,
            seed=repeat,
        ),
        slos=objective.slos,
        scheduler=SchedulerConfig(
            max_offline_requests=case.in_flight,
            stream_slowdown=objective.stream_slowdown,
            seed=repeat,
        ),
    )


_MAX_REQUESTS: Final = 2048
"""Least ``--max-running-requests`` of SGLang on a GPU."""


def _row(result: SimulationResult, begin_s: float, end_s: float) -> dict[str, Any]:
    latencies = latency_report(result.online)
    prompts = sum(one.prompt_tokens for one in result.online if one.token_times_s)
    cached = sum(one.cached_prompt_tokens for one in result.online if one.token_times_s)
    return {
        "online": latencies.n,
        "unfinished": latencies.n - latencies.finished,
        **percentiles_ms("ttft", latencies.ttft),
        **percentiles_ms("itl", latencies.itl),
        **percentiles_ms("tpot", latencies.tpot),
        "e2e_p50_ms": in_ms(latencies.e2e.p50_s),
        "offline_tokens_per_s": throughput(result.offline, begin_s, end_s).total_tokens_per_s,
        "online_from_cache": cached / prompts if prompts else math.nan,
        "seconds": end_s - begin_s,
        "suspended": result.counters.suspensions,
        "retracted": result.counters.retractions,
    }
