"""ConServe Fig. 6 and 8, Table 2, §6.5: load, SLO scale, burstiness, lengths, 70B; mechanisms.

Llama-3.1-8B on one H100; Gamma arrivals, CV 0.5, 4096 prompt and 256 output tokens (§6.2); offline
a mix of the three datasets of Table 1, as the text does not name the one it used. No prompts share
a prefix, and the engine of the paper keeps nothing of a retracted request on the device, so there
is no prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import geometric_mean, mean
from typing import Final

from paper.experiment import Cell, Findings
from paper.testbed import (
    Lengths,
    Testbed,
    gamma_arriving,
    mixed,
    offline_backlog,
    offline_per_s,
    p99_itl_ms,
    p99_ttft_ms,
)
from sglang_coserve.core.policies.baselines import (
    NonPreemptivePolicy,
    OnlineOnlyPolicy,
    SarathiPolicy,
)
from sglang_coserve.core.policies.conserve import ConservePolicy
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.metrics import SloTargets, attainment
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import Workload, simulate

ONLINE: Final = Lengths(4096, 4096, 256, 256)
BURSTGPT: Final = Lengths(2747, 3446, 267, 481)
DATASETS: Final = {
    "DuReader": Lengths(21776, 29306, 166, 754),
    "MultiNews": Lengths(6916, 12084, 394, 788),
    "VCSUM": Lengths(18803, 32768, 337, 510),
}
CHUNK_TOKENS: Final = 8192
CHUNK_TOKENS_70B: Final = 4096
"""The baselines' token budgets. The text does not state them; these come nearest to the P99 TBTs
that it gives for Sarathi-P: 375 ms with the small model (§6.5), 212 to 453 with the large one."""

Results = Mapping[str, SimulationResult]
ALONE: Final = "Online-Only"
PLAIN: Final = Testbed(model="llama-3.1-8b", hardware="h100", prefix_cache=False)
FULL: Final = replace(PLAIN, safepoint_layers=4, checkpoint_gb_s=37.0)
"""With ConServe's safepoints and checkpoints, as in §6.5."""

Systems = Mapping[str, tuple[Testbed, Callable[[], Policy]]]


def systems(chunk_tokens: int, model: str = PLAIN.model, tp_size: int = 1) -> Systems:
    """Return what is compared; the baselines compute so many tokens in a step."""
    plain, full = (replace(bed, model=model, tp_size=tp_size) for bed in (PLAIN, FULL))
    return {
        ALONE: (plain, OnlineOnlyPolicy),
        "Non-Preemptive": (plain, partial(NonPreemptivePolicy, chunk_tokens)),
        "Sarathi-P": (plain, partial(SarathiPolicy, chunk_tokens)),
        "ConServe": (full, ConservePolicy),
        "coserve": (full, CoservePolicy),
    }


SYSTEMS: Final = systems(CHUNK_TOKENS)
LARGE: Final = systems(CHUNK_TOKENS_70B, "llama-3.1-70b", tp_size=4)

GIVEN: Final = SloTargets(ttft_s=0.5, tpot_s=0.07)


def workload(
    rate_per_s: float,
    seconds: float,
    cv: float = 0.5,
    online: Lengths = ONLINE,
    datasets: Sequence[Lengths] = tuple(DATASETS.values()),
) -> Workload:
    """Return Gamma arrivals beside an offline backlog."""
    return Workload(
        online=gamma_arriving(rate_per_s, cv, online, seconds),
        offline=offline_backlog(lambda: mixed(datasets, seed=2)),
        backlog_depth=64,
        interval_s=seconds,
    )


def run_system(
    load: Workload, name: str, targets: SloTargets, among: Systems = SYSTEMS
) -> SimulationResult:
    """Run one of the systems with these targets."""
    testbed, policy = among[name]
    return simulate(load, testbed.with_targets(targets), policy())


def compare(
    load: Workload, names: Sequence[str], among: Systems = SYSTEMS
) -> dict[str, SimulationResult]:
    """Run online requests alone, then systems with the targets that follow from them."""
    alone = run_system(load, ALONE, SloTargets(), among)
    targets = own_targets(alone)
    return {ALONE: alone} | {name: run_system(load, name, targets, among) for name in names}


def own_targets(alone: SimulationResult, scale: float = 1.0) -> SloTargets:
    """Return the P99 latencies of *Online-Only*, scaled: how the paper sets the SLO."""
    return SloTargets(scale * p99_ttft_ms(alone) / 1e3, scale * p99_itl_ms(alone) / 1e3)


COLUMNS = ("P99 TTFT ms", "P99 TBT ms", "offline tok/s", "recomputed %", "retracted", "suspended")


def rows(results: Results, case: str = "") -> list[tuple[Cell, ...]]:
    """Return a row below ``COLUMNS`` for each system."""
    return [
        (
            f"{case}{name}",
            p99_ttft_ms(one),
            p99_itl_ms(one),
            offline_per_s(one),
            100
            * one.recomputed_tokens
            / (one.counters.online_tokens + one.counters.offline_tokens),
            one.counters.retractions,
            one.counters.suspensions,
        )
        for name, one in results.items()
    ]


def ratios(
    many: Sequence[Results], of: Callable[[SimulationResult], float], base: str
) -> list[float]:
    """Return a figure of ConServe over that of another system, in each comparison."""
    return [of(results["ConServe"]) / of(results[base]) for results in many]


def fig6(seconds: float) -> Iterator[Findings]:
    """Latency and offline throughput over the online load (a) and the SLO scale (b)."""
    by_rate: dict[float, dict[str, SimulationResult]] = {}
    for rate in (1.0, 2.0, 3.0, 4.0):
        by_rate[rate] = compare(workload(rate, seconds), list(SYSTEMS)[1:])
    many = list(by_rate.values())
    ttft, tbt = (ratios(many, of, ALONE) for of in (p99_ttft_ms, p99_itl_ms))
    kept = ratios(many, offline_per_s, "Non-Preemptive")
    gains = ratios(many, offline_per_s, "Sarathi-P")
    gain = f"{geometric_mean(gains):.2f}x ({max(gains):.2f}x)"
    yield Findings(
        "Fig. 6(a)",
        ("load, policy", *COLUMNS),
        [row for rate, results in by_rate.items() for row in rows(results, f"{rate:g} req/s ")],
        [
            ("P99 TTFT above Online-Only, at most", "25%", f"{max(ttft) - 1:.0%}"),
            ("P99 TBT above Online-Only, at most", "19%", f"{max(tbt) - 1:.0%}"),
            ("offline, of Non-Preemptive, mean", "82.3%", f"{mean(kept):.1%}"),
            ("offline, times Sarathi-P, mean (max)", "3.0x (7.48x)", gain),
        ],
    )
    load, alone = workload(2.0, seconds), by_rate[2.0][ALONE]
    most = offline_per_s(by_rate[2.0]["Non-Preemptive"])
    cells: list[tuple[Cell, ...]] = []
    attained, shares = {}, {}
    loads = {"ConServe": load, "ConServe alone": replace(load, offline=tuple, backlog_depth=0)}
    for scale in (1.0, 1.25, 1.5, 2.0, 3.0):
        targets = own_targets(alone, scale)
        for name, system in (*((name, "ConServe") for name in loads), ("coserve", "coserve")):
            result = run_system(loads.get(name, load), system, targets)
            share = offline_per_s(result) / most
            within = attainment(result.online, targets) or 0.0
            cells.append((f"{scale:g} {name}", 100 * within, 100 * share))
            attained[scale, name], shares[scale, name] = within, share
    looser = [attained[scale, "ConServe"] for scale, _ in attained if scale > 1]
    yield Findings(
        "Fig. 6(b)",
        ("SLO scale", "attainment %", "offline, % of Non-Preemptive"),
        cells,
        [
            ("attainment at scale 1.0", ">= 86%", f"{attained[1.0, 'ConServe']:.1%}"),
            ("attainment above scale 1, at least", "> 99%", f"{min(looser):.1%}"),
            ("offline at scale 1.5, of Non-Preemptive", "93%", f"{shares[1.5, 'ConServe']:.1%}"),
        ],
    )


def fig8(seconds: float) -> Iterator[Findings]:
    """Burstiness (a), prompt length (b), output length (c); the rate falls with the length."""

    def of(prompt_tokens: int, output_tokens: int) -> Workload:
        lengths = Lengths(prompt_tokens, prompt_tokens, output_tokens, output_tokens)
        rate_per_s = 2.0 * (4096 + 256) / (prompt_tokens + output_tokens)
        return workload(rate_per_s, seconds, online=lengths)

    loads = {f"(a) CV {cv:g} ": workload(2.0, seconds, cv) for cv in (0.5, 1.0, 2.0, 4.0)}
    loads |= {f"(b) prompt {tokens} ": of(tokens, 256) for tokens in (1024, 2048, 8192, 16384)}
    loads |= {f"(c) output {tokens} ": of(4096, tokens) for tokens in (64, 128, 512, 1024)}
    found = {
        name: compare(load, ("Sarathi-P", "ConServe", "coserve")) for name, load in loads.items()
    }
    bursty = [results for name, results in found.items() if name.startswith("(a)")]
    ttft, tbt, offline = (
        geometric_mean(ratios(bursty, of, "Sarathi-P"))
        for of in (p99_ttft_ms, p99_itl_ms, offline_per_s)
    )
    yield Findings(
        "Fig. 8",
        ("case, policy", *COLUMNS),
        [row for name, results in found.items() for row in rows(results, name)],
        [
            ("(a) P99 TTFT, best baseline's ÷ its", "1.68x", f"{1 / ttft:.2f}x"),
            ("(a) P99 TBT, the same", "2.38x", f"{1 / tbt:.2f}x"),
            ("(a) offline, times the best baseline's", "3.62x", f"{offline:.2f}x"),
        ],
    )


TABLE_2: Final = {
    # P99 TTFT in s, P99 TBT in ms, offline tokens/s: Non-Preemptive, Sarathi-P, ConServe.
    "Mixed": ((15.2, 450, 1995), (2.91, 441, 895), (1.14, 201, 1553)),
    "DuReader": ((38.7, 659, 1276), (2.98, 400, 715), (1.67, 204, 1187)),
    "MultiNews": ((11.0, 305, 2765), (2.11, 212, 1698), (1.04, 194, 2281)),
    "VCSUM": ((46.2, 566, 1218), (3.01, 453, 255), (1.68, 208, 1064)),
}
TABLE_2_ALONE: Final = (1.08, 184, 0)
TABLE_2_RATE_PER_S: Final = 3.2


def table2(seconds: float) -> Iterator[Findings]:
    """A model of 70B on four GPUs, BurstGPT's lengths, each dataset offline."""
    names = ("Non-Preemptive", "Sarathi-P", "ConServe")
    cells: list[tuple[Cell, ...]] = []
    claims = []
    for dataset, stated in TABLE_2.items():
        datasets = [DATASETS[dataset]] if dataset in DATASETS else list(DATASETS.values())
        load = workload(TABLE_2_RATE_PER_S, seconds, 1.0, BURSTGPT, datasets)
        results = compare(load, (*names, "coserve"), LARGE)
        if not cells:
            cells.append((ALONE, *_beside(TABLE_2_ALONE, results[ALONE])))
        for name, figures in zip((*names, "coserve"), (*stated, "---"), strict=True):
            cells.append((f"{dataset}, {name}", *_beside(figures, results[name])))
        theirs = [per_s for _, _, per_s in stated]
        ours = [offline_per_s(results[name]) for name in names]
        paper, found = (
            f"{conserve / most:.0%}, {conserve / sarathi:.2f}x"
            for most, sarathi, conserve in (theirs, ours)
        )
        claims.append((f"{dataset}: offline, of Non-Preemptive, times Sarathi-P", paper, found))
    head = ("P99 TTFT s", "P99 TBT ms", "offline tok/s")
    yield Findings("Table 2, paper / ours", ("offline, policy", *head), cells, claims)


def _beside(paper: Sequence[object], result: SimulationResult) -> list[str]:
    ours = (p99_ttft_ms(result) / 1e3, p99_itl_ms(result), offline_per_s(result))
    return [
        f"{stated} / {found:,.2f}" if place == 0 else f"{stated} / {found:,.0f}"
        for place, (stated, found) in enumerate(zip(paper, ours, strict=True))
    ]


def ablation(seconds: float) -> Iterator[Findings]:
    """Two mechanisms of §6.5 where they have something to do.

    Preemption, where the engine often has no online request, and some would be late without it;
    checkpoints, where memory is short, and admission keeps none free that would prevent
    retractions.
    """
    quiet, busy = workload(0.1, seconds), workload(4.0, seconds / 5)
    cases = {
        "0.1 req/s, offline steps run to their end": (quiet, replace(FULL, safepoint_layers=0)),
        "0.1 req/s, a safepoint every 4 layers": (quiet, FULL),
        "4 req/s, no checkpoints": (busy, replace(FULL, checkpoint_gb_s=0.0)),
        "4 req/s, checkpoints": (busy, FULL),
    }
    results = {}
    for name, (load, testbed) in cases.items():
        targets = replace(GIVEN, ttft_s=0.2) if load is quiet else GIVEN
        setup = replace(testbed.with_targets(targets), scheduler=SchedulerConfig(headroom_tokens=0))
        results[name] = simulate(load, setup, ConservePolicy())
    before, after, *pair = results.values()
    ttft = p99_ttft_ms(after) / p99_ttft_ms(before) - 1
    offline = offline_per_s(pair[1]) / offline_per_s(pair[0])
    yield Findings(
        "§6.5",
        ("load, offline work", *COLUMNS),
        rows(results),
        [
            ("P99 TTFT with preemption", "-24%", f"{ttft:.0%}"),
            ("offline tokens/s with checkpoints", "1.29x", f"{offline:.2f}x"),
        ],
    )
