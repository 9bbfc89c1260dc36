"""ConServe Fig. 1, 2, 3, 7 and 9: how load varies, what it leaves idle, and how it is filled.

BurstGPT's trace is not here. Its lengths (Table 1) with the arrivals of Azure's stand in for it, or
with Gamma arrivals of the CV that the paper takes from it, 0.5.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from common.arrivals import synthesize
from paper.conserve import (
    ALONE,
    BURSTGPT,
    COLUMNS,
    LARGE,
    ONLINE,
    SYSTEMS,
    Results,
    compare,
    own_targets,
    rows,
    run_system,
    systems,
    workload,
)
from paper.experiment import Cell, Findings
from paper.testbed import offline_per_s, p99_itl_ms, p99_ttft_ms
from sglang_coserve.core.request import RequestClass
from sglang_coserve.metrics import SloTargets, summarize
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import Workload
from sglang_coserve.workload.shape import until
from sglang_coserve.workload.trace import read_trace, sample_path

AZURE_PER_10_S: Final = (
    *(13, 18, 28, 30, 58, 44, 51, 44, 46, 39, 39, 46, 52, 43, 62, 58, 59, 55, 70, 46, 54, 64, 57),
    *(62, 44, 57, 51, 48, 55, 52, 56, 42, 48, 37, 48, 42, 43, 42, 46, 50, 49, 38, 40, 40, 50, 54),
    *(39, 38, 59, 56, 49, 51, 48, 59, 44, 53, 49, 54, 47, 51),
)
"""Requests in the first ten minutes of Azure's conversation trace of 2023 (CC BY 4.0,
Azure/AzurePublicDataset)."""

RATE_8B_PER_S: Final = 5.2
RATE_70B_PER_S: Final = 3.0
"""The text states no rates: these bring *Non-Preemptive* near its offline tokens/s."""

LINE: Final = 1.25
"""Times *Online-Only*'s P99. Nor does it state where Fig. 7's red lines are; ConServe stays within
this in Fig. 6(a). What the policies get as targets is the P99 itself, as there."""

MUCH_KV_TOKENS: Final = 2_000_000

WINDOW_S: Final = 30.0
MOST_RATE_PER_S: Final = 20.0
"""More than the engine can serve."""


def azure_arrivals(rate_per_s: float) -> Iterator[float]:
    """Yield endless arrivals at this mean rate, with Azure's pattern, Poisson in each 10 s."""
    rng = random.Random(1)
    mean = sum(AZURE_PER_10_S) / len(AZURE_PER_10_S)
    now_s = 0.0
    while True:
        yield now_s
        now = AZURE_PER_10_S[int(now_s / 10) % len(AZURE_PER_10_S)]
        now_s += rng.expovariate(rate_per_s * now / mean)


def like_azure(rate_per_s: float, seconds: float) -> Workload:
    """Return requests of BurstGPT's lengths that come as Azure's, beside an offline backlog."""
    requests = synthesize(azure_arrivals(rate_per_s), BURSTGPT.draws(1))
    online = partial(from_trace, list(until(requests, seconds)), RequestClass.ONLINE)
    return replace(workload(rate_per_s, seconds), online=online)


def motivation(seconds: float) -> Iterator[Findings]:
    """Fig. 1, 2 and 3."""
    yield from fig1()
    yield from fig2(seconds)
    yield from fig3(seconds)


def fig1() -> Iterator[Findings]:
    """Requests a minute, of ten minutes."""
    sample = Counter(int(each.arrival_s // 60) for each in read_trace(sample_path("online")))
    minutes = {
        "Azure 2023, conversations": [sum(AZURE_PER_10_S[i : i + 6]) for i in range(0, 60, 6)],
        "the bundled sample": [sample[minute] for minute in range(10)],
    }
    rises = {
        name: max(later / one for i, one in enumerate(counts) for later in counts[i:])
        for name, counts in minutes.items()
    }
    found = "; ".join(f"{rise:.1f}x" for rise in rises.values())
    yield Findings(
        "Fig. 1(b)",
        ("trace", "requests a minute", "least", "most", "rise"),
        [
            (name, sum(counts) / 10, min(counts), max(counts), rises[name])
            for name, counts in minutes.items()
        ],
        [("rise of the rate within 10 minutes, up to", "3x", found)],
    )


def fig2(seconds: float) -> Iterator[Findings]:
    """P99 TTFT of online requests alone over the utilization."""
    at = {
        rate: run_system(workload(rate, seconds), ALONE, SloTargets())
        for rate in (0.5, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5, MOST_RATE_PER_S)
    }
    most = at.pop(MOST_RATE_PER_S).online_throughput.total_tokens_per_s
    tokens = ONLINE.prompt_mean + ONLINE.output_mean
    yield Findings(
        "Fig. 2",
        ("requests/s", "offered tokens/s", "utilization %", "P99 TTFT ms"),
        [
            (rate, rate * tokens, 100 * rate * tokens / most, p99_ttft_ms(result))
            for rate, result in at.items()
        ],
        [("idle at 2,000 tokens/s", "> 70%", f"{1 - 2000 / most:.0%} of {most:,.0f} tokens/s")],
    )


def fig3(seconds: float) -> Iterator[Findings]:
    """Two priorities with preemption and without, in steps of several sizes."""
    load = workload(2.0, seconds)
    found = {ALONE: run_system(load, ALONE, SloTargets())}
    claims = []
    for chunk_tokens in (8192, 4096, 2048):
        among = systems(chunk_tokens)
        for name in ("Non-Preemptive", "Sarathi-P"):
            found[f"{name}, {chunk_tokens}"] = run_system(load, name, SloTargets(), among)
        free, preemptive = list(found.values())[-2:]
        ttft, tbt = (of(preemptive) / of(found[ALONE]) for of in (p99_ttft_ms, p99_itl_ms))
        offline = offline_per_s(free) / offline_per_s(preemptive)
        ours = f"{ttft:.2f}x, {tbt:.2f}x, {offline:.2f}x"
        name = "Preemptive: P99 TTFT and TBT, times Online-Only; offline, Non-Preemptive's ÷ its"
        claims.append((f"{name}; steps of {chunk_tokens}", "3.59x, 3.01x, 4.27x", ours))
    yield Findings("Fig. 3", ("policy, tokens of a step", *COLUMNS), rows(found), claims)


def over_time(seconds: float) -> Iterator[Findings]:
    """Fig. 7 and 9."""
    yield from fig7(seconds)
    yield from fig9(seconds)


def fig7(seconds: float) -> Iterator[Findings]:
    """70B: P99 TTFT and TBT in every ``WINDOW_S``, and the share of these below the lines."""
    found = compare(like_azure(RATE_70B_PER_S, seconds), list(LARGE)[1:], LARGE)
    line = own_targets(found[ALONE], LINE)
    windows = {name: list(by_window(result)) for name, result in found.items()}
    cells: list[tuple[Cell, ...]] = [
        (f"{number * WINDOW_S:g}", *(f"{ttft_s:.2f} / {tbt_s * 1e3:.0f}" for ttft_s, tbt_s in at))
        for number, at in enumerate(zip(*windows.values(), strict=True))
    ]
    within = {name: _shares(at, line) for name, at in windows.items()}
    cells.append((f"within {line.ttft_s:.2f} s / {line.tpot_s:.3f} s", *within.values()))
    yield Findings(
        "Fig. 7: P99 TTFT s / P99 TBT ms",
        ("from s", *windows),
        cells,
        [
            (f"within the SLO, TTFT / TBT: {name}", paper, within[name])
            for name, paper in (
                (ALONE, "always"),
                ("ConServe", "always"),
                ("Non-Preemptive", "frequent violations"),
                ("Sarathi-P", "frequent violations"),
            )
        ],
    )
    claim = ("offline, of Non-Preemptive, times Sarathi-P", "78%, 1.74x", _offline(found))
    yield Findings("Fig. 7, all of it", ("policy", *COLUMNS), rows(found), [claim])


def by_window(result: SimulationResult) -> Iterator[tuple[float, float]]:
    """Yield the P99 TTFT and TBT, in s, of the requests and tokens that come in each window."""
    ttfts: dict[int, list[float]] = defaultdict(list)
    gaps: dict[int, list[float]] = defaultdict(list)
    for request in result.online:
        if request.ttft_s is not None:
            ttfts[int(request.arrival_s // WINDOW_S)].append(request.ttft_s)
        for gap_s, at_s in zip(request.itls_s, request.token_times_s[1:], strict=True):
            gaps[int(at_s // WINDOW_S)].append(gap_s)
    for window in range(int(result.interval_s // WINDOW_S)):
        ttft_p99_s, gap_p99_s = (summarize(found[window]).p99_s for found in (ttfts, gaps))
        yield ttft_p99_s or math.nan, gap_p99_s or math.nan


def _shares(windows: Sequence[tuple[float, float]], line: SloTargets) -> str:
    limits_s = (line.ttft_s, line.tpot_s)
    shares = [
        sum(one[which] <= limit_s for one in windows) / len(windows)
        for which, limit_s in enumerate(limits_s)
        if limit_s is not None
    ]
    return " / ".join(f"{share:.0%}" for share in shares)


def _offline(found: Results) -> str:
    free, sarathi, own = (
        offline_per_s(found[name]) for name in ("Non-Preemptive", "Sarathi-P", "ConServe")
    )
    return f"{own / free:.0%}, {own / sarathi:.2f}x"


def fig9(seconds: float) -> Iterator[Findings]:
    """8B, with the arrivals of Azure's trace and with Gamma ones."""
    names = list(SYSTEMS)[1:]
    azure = like_azure(RATE_8B_PER_S, seconds)
    found = {
        "Azure's arrivals": compare(azure, names),
        f"the same, {MUCH_KV_TOKENS:,} KV tokens": compare(
            azure,
            names,
            {
                name: (replace(testbed, kv_capacity_tokens=MUCH_KV_TOKENS), policy)
                for name, (testbed, policy) in SYSTEMS.items()
            },
        ),
        "Gamma, CV 0.5": compare(workload(RATE_8B_PER_S, seconds, 0.5, BURSTGPT), names),
    }
    yield Findings(
        "Fig. 9",
        ("arrivals, policy", *COLUMNS),
        [row for name, results in found.items() for row in rows(results, f"{name}, ")],
        [
            (
                f"offline, of Non-Preemptive, times Sarathi-P: {name}",
                "88%, 4.00x",
                _offline(results),
            )
            for name, results in found.items()
        ],
    )
