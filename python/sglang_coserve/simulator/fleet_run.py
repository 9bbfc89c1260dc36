"""Fleets of several sizes under the same load of each engine, beside one engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from sglang_coserve.core.engine_load import WantedLines, wanted_lines
from sglang_coserve.core.latency_model.machine import kv_bytes_per_token
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import attainment, latency_report
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.fleet import Fleet, FleetEngine, Mailbox
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.report import ms_text, percent_text, text_table
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import RunResult
from sglang_coserve.simulator.run import DRAIN_S, SimulationSetup, simulate
from sglang_coserve.workload.trace import TraceRequest

_PROGRESS_STEPS: Final = 256


def strict_engine(
    scheduler: Scheduler, executor: SimulatedExecutor, mailbox: Mailbox
) -> FleetEngine:
    """Return an engine that says which lines it wants, as ``/coserve/load`` of a real one does.

    A line that it retracts goes back at once, and is computed again; a real one leaves its KV.
    """

    def take_back(request: SimRequest) -> None:
        if request.info.is_online:
            executor.submit(request)
        else:
            engine.forget(request)
            mailbox.returned.append(request)

    def wants() -> WantedLines | None:
        running = executor.admitted.values()
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for request in running:
            lengths[request.info.is_online].append(request.computed_tokens)
        allowance = scheduler.interference.allowance
        return wanted_lines(
            scheduler.model,
            lengths[True],
            lengths[False],
            tpot_s=allowance.targets.tpot_s,
            gap_share=allowance.gap_share,
            free_kv_tokens=executor.pool.free_pages * executor.pool.page_tokens,
            free_requests=executor.config.max_running_requests - len(running),
            runs_all=not executor.offline_waiting,
        )

    engine = SimEngine(scheduler, executor, mailbox, [mailbox], take_back)
    return FleetEngine(engine, executor, mailbox, "strict", wants)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Which fleets are simulated.

    Raises:
        ConfigError: they cannot be; the message says why.
    """

    one: SimulationOptions
    """An engine and its load; there must be one policy, a backlog and a duration."""

    sizes: tuple[int, ...]
    pools: bool = False
    """Whether half of the engines are relaxed, and half, which get the online requests, strict."""

    def __post_init__(self) -> None:
        """Check what is not checked elsewhere."""
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"engines {self.sizes}: name sizes of fleets, from 1")
        if "," in self.one.policy:
            raise ConfigError(f"policy {self.one.policy!r}: a fleet has one")
        if self.one.duration is None or not self.one.backlog:
            raise ConfigError("a fleet needs a duration and a backlog")
        if self.pools and any(size % 2 for size in self.sizes):
            raise ConfigError(f"engines {self.sizes}: half of them are strict: use even numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult(RunResult):
    """The run of one fleet."""

    num_engines: int
    is_alone: bool
    """True for an engine without gateway and router, whose offline queue is never empty."""

    busiest_share: float
    """Offline tokens computed by the engine with most of them, divided by the mean."""

    lines_pulled: int = 0
    lines_returned: int = 0

    @property
    def cached_share(self) -> float | None:
        """Prompt tokens of lines that were found in a prefix cache at first; None without any."""
        served = [line for line in self.offline if line.token_times_s]
        total = sum(line.prompt_tokens for line in served)
        return sum(line.cached_prompt_tokens for line in served) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the timelines, for JSON."""
        result = RunResult.to_dict(self)
        result["offline"] |= {
            "cached_share": self.cached_share,
            "busiest_share": self.busiest_share,
            "lines_pulled": self.lines_pulled,
            "lines_returned": self.lines_returned,
        }
        return {"engines": self.num_engines, "is_alone": self.is_alone, **result}


def simulate_fleets(options: FleetOptions, control: RunControl) -> list[FleetResult]:
    """Run one engine alone, and then each fleet; return the results, the last perhaps incomplete.

    Each engine of a fleet gets as many online requests as the one alone: a fleet of n has n copies
    of the trace, each begun somewhere else in it, whose requests its engines take in turn.

    Raises:
        CoserveError: an option or a file cannot be used, or there are too few lines.
    """
    setup = options.one.setup(options.one.policy)
    results = [_alone(options, setup, control)]
    for size in options.sizes:
        if control.should_stop or not results[-1].is_complete:
            break
        results.append(_fleet(options, setup, size, control))
    return results


def _alone(options: FleetOptions, setup: SimulationSetup, control: RunControl) -> FleetResult:
    workload = options.one.workload()
    control.begin("one engine alone", workload.interval_s)
    policy = make_policy(options.one.policy)
    result = simulate(workload, setup, policy, on_progress=control.tick)
    return FleetResult(
        num_engines=1,
        is_alone=True,
        targets=setup.targets,
        interval_s=result.interval_s,
        is_complete=result.is_complete,
        online=result.online,
        offline=result.offline,
        busiest_share=1.0,
    )


def _fleet(
    options: FleetOptions, setup: SimulationSetup, size: int, control: RunControl
) -> FleetResult:
    interval_s, machine = options.one.duration, options.one.machine
    assert interval_s is not None
    control.begin(f"{size} engines", interval_s)
    trace = _copies(options.one.online_trace(), size, interval_s)
    # Where there are pools, online requests are the strict engines'.
    num_relaxed = size // 2 if options.pools else 0
    num_serving = size - num_relaxed

    def make_engine(number: int) -> FleetEngine:
        executor = SimulatedExecutor(
            replace(setup.executor, seed=setup.executor.seed + number),
            setup.true_model or setup.model,
        )
        scheduler = setup.make_scheduler(make_policy(options.one.policy))
        # A router takes turns. It begins with the second one.
        turn = (number - num_relaxed - 1) % num_serving
        own = trace[turn::num_serving] if number >= num_relaxed else ()
        mailbox = Mailbox(from_trace(own, RequestClass.ONLINE, seed=options.one.seed))
        if number >= num_relaxed and options.pools:
            return strict_engine(scheduler, executor, mailbox)
        engine = SimEngine(scheduler, executor, mailbox, [mailbox])
        return FleetEngine(engine, executor, mailbox, "relaxed" if options.pools else None)

    fleet = Fleet(
        [make_engine(number) for number in range(size)],
        options.one.workload().offline(),
        link_tokens_per_s=machine.hardware.link_byte_per_s / kv_bytes_per_token(machine.shape),
    )
    is_complete = _run(fleet, interval_s, control)
    if fleet.lines_end_s < interval_s:
        raise ConfigError(
            f"{size} engines had all lines after {fleet.lines_end_s:.0f} s: name a longer file,"
            " lengths such as 4096x256 for an endless batch, or a shorter duration"
        )
    # A line that moved has arrived at several.
    requests = {id(r): r for each in fleet.engines for r in each.engine.requests}.values()
    by_engine = [each.engine.counters.offline_tokens for each in fleet.engines]
    return FleetResult(
        num_engines=size,
        is_alone=False,
        targets=setup.targets,
        interval_s=interval_s if is_complete else fleet.now_s,
        is_complete=is_complete,
        online=tuple(r.timeline() for r in requests if r.info.is_online),
        offline=tuple(r.timeline() for r in requests if not r.info.is_online),
        busiest_share=max(by_engine) * size / max(1, sum(by_engine)),
        lines_pulled=fleet.lines_pulled,
        lines_returned=fleet.lines_returned,
    )


def _run(fleet: Fleet, interval_s: float, control: RunControl) -> bool:
    """Run until the interval is over and its online requests have ended; False when stopped."""
    for end_s in (interval_s, interval_s + DRAIN_S):
        steps = 0
        while fleet.step(end_s):
            steps += 1
            if steps % _PROGRESS_STEPS:
                continue
            if control.tick(min(fleet.now_s, interval_s)):
                return False
            if fleet.now_s >= interval_s and not any(e.engine.has_online for e in fleet.engines):
                return True
    return True


def _copies(trace: Sequence[TraceRequest], count: int, interval_s: float) -> list[TraceRequest]:
    """Return copies that begin at equal distances in the trace, and go on at its beginning."""
    copied = chain.from_iterable(
        (
            replace(
                request,
                index=copy * len(trace) + position,
                arrival_s=(request.arrival_s + copy * interval_s / count) % interval_s,
            )
            for position, request in enumerate(trace)
        )
        for copy in range(count)
    )
    return sorted(copied, key=lambda request: request.arrival_s)


FLEET_COLUMNS: Final = (
    "engines",
    "TTFT P99 ms",
    "TPOT P99 ms",
    "attainment %",
    "offline tok/s",
    "of alone %",
    "busiest ÷ mean",
    "cached %",
    "pulled",
    "returned",
)


def fleet_table_text(results: Sequence[FleetResult]) -> str:
    """Return a row for each fleet, the engine alone first, as plain text, marked as simulated."""
    alone_per_s = results[0].offline_throughput.total_tokens_per_s
    return text_table(FLEET_COLUMNS, [_row(result, alone_per_s) for result in results])


def _row(result: FleetResult, alone_per_s: float) -> tuple[str, ...]:
    latency = latency_report(result.online)
    attained = attainment(result.online, result.targets)
    offline_per_s = result.offline_throughput.total_tokens_per_s
    expected_per_s = alone_per_s * result.num_engines
    name = f"{result.num_engines}{', alone' if result.is_alone else ''}"
    return (
        name + ("" if result.is_complete else " (broken off)"),
        ms_text(latency.ttft.p99_s),
        ms_text(latency.tpot.p99_s),
        percent_text(attained),
        f"{offline_per_s:,.0f}",
        percent_text(offline_per_s / expected_per_s if expected_per_s else None),
        f"{result.busiest_share:.2f}",
        percent_text(result.cached_share),
        str(result.lines_pulled),
        str(result.lines_returned),
    )
