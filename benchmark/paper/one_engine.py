"""BROS Fig. 11, OOCO Fig. 3 and Table 6: what one engine does with one class of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from statistics import mean
from typing import Final

from paper.bros import (
    LARGE,
    SHAREGPT,
    SMALL,
    SWAP_GB_S,
    TARGETS,
    TPOT,
    TTFT,
    hybrid,
    normalized_s,
    share,
)
from paper.experiment import Cell, Findings
from paper.ooco import MACHINE, TESTBED
from paper.testbed import Lengths, Testbed, gamma_arriving
from sglang_coserve.core.latency_model.operators import Operators, kv_capacity_tokens
from sglang_coserve.core.policies.baselines import FcfsPolicy
from sglang_coserve.core.policies.bros import BrosPolicy
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import Workload, simulate

AZURE_2024: Final = Lengths.of_deviation(1512.30, 1512.30, 98.75, 98.75)
"""Means of OOCO's Table 5; it states no deviations."""

SATURATED: Final = 0.9
"""Share of the most FLOP/s from which on compute bounds a step; the text names no share."""

XLLM_COMPUTE: Final = 0.5
"""xLLM's 12,083 tokens/s of 15.2 GFLOP each are 49% of the chip's FLOP/s; we assume 65%."""


def bros_fig11(seconds: float) -> Iterator[Findings]:
    """RT requests alone, and steps of the hybrid workload, of which Fig. 13 takes a share."""
    policies: dict[str, tuple[int, Callable[[], BrosPolicy | FcfsPolicy]]] = {
        "vLLM": (256, FcfsPolicy),
        "BROS": (256, BrosPolicy),
        "BROS, B_base 256": (256, lambda: BrosPolicy(base_batch_requests=256)),
        "vLLM, 1,024 places": (1024, FcfsPolicy),
        "BROS, 1,024 places": (1024, BrosPolicy),
    }
    rows: list[tuple[Cell, ...]] = []
    by_policy: dict[str, list[SimulationResult]] = {name: [] for name in policies}

    def add(name: str, result: SimulationResult) -> None:
        step_ms = 1e3 * result.counters.busy_s / result.counters.iterations
        shares = (100 * share(result, TTFT), 100 * share(result, TPOT))
        ended_per_s = result.online_throughput.requests_per_s
        rows.append((name, normalized_s(result) * 1e3, ended_per_s, *shares, step_ms))

    for rate in (10.0, 20.0, 24.0, 26.0, 28.0):
        load = Workload(gamma_arriving(rate, 1.0, SHAREGPT, seconds), interval_s=seconds)
        for name, (places, policy) in policies.items():
            setup = replace(SMALL, max_running=places).with_targets(TARGETS)
            result = simulate(load, setup, policy())
            by_policy[name].append(result)
            add(f"{rate:g} req/s, {name}", result)

    def against_vllm(name: str) -> tuple[str, str]:
        own, vllm = by_policy[name], by_policy["vLLM"]
        slower = sum(map(normalized_s, own)) / sum(map(normalized_s, vllm)) - 1
        ended, of_vllm = (
            mean(one.online_throughput.requests_per_s for one in results) for results in (own, vllm)
        )
        return f"{slower:+.0%}", f"{ended / of_vllm:.2f}x"

    claims = []
    for name in list(policies)[1:]:
        latency, throughput = against_vllm(name)
        paper = ("-29.36%", "1.08x") if name == "BROS" else ("–", "–")
        claims.append((f"normalized latency against vLLM: {name}", paper[0], latency))
        claims.append((f"throughput, times vLLM's: {name}", paper[1], throughput))
    for name, rate, testbed in (("14B", 8.0, SMALL), ("32B", 10.0, LARGE)):
        setup = replace(testbed, checkpoint_gb_s=SWAP_GB_S).with_targets(TARGETS)
        result = simulate(hybrid(rate, seconds), setup, BrosPolicy())
        add(f"{name}, {rate:g} req/s beside BE, BROS", result)
    head = ("RT rate, policy", "ms/token", "req/s", "TTFT SLO %", "TPOT SLO %", "step ms")
    yield Findings("Fig. 11", head, rows, claims)


def ooco_points(seconds: float) -> Iterator[Findings]:
    """Fig. 3 and Table 6."""
    yield from fig3()
    yield from table6(seconds)


def fig3() -> Iterator[Findings]:
    """The roofline of prefills and decodes of several lengths, and where compute saturates."""
    lengths = [2**power for power in range(6, 14)]
    points = {f"prefill, {tokens}": StepStats.of([(tokens, 0)]) for tokens in lengths}
    capacity_tokens = kv_capacity_tokens(MACHINE.shape, MACHINE.hardware)
    points |= {
        f"decode, {size} of {tokens}": StepStats.of([(1, tokens)] * size)
        for tokens in (256, 1024, 4096)
        for size in (1, 16, 64, 256, 512, 1024)
        if size * tokens <= capacity_tokens
    }

    def knee(batch: Callable[[int], StepStats]) -> str:
        enough = SATURATED * point(batch(8192))[-1]
        return str(next(size for size in count(1) if point(batch(size))[-1] >= enough))

    yield Findings(
        "Fig. 3",
        ("step", "ms", "FLOP/byte", "TFLOP/s"),
        [(name, *point(batch)) for name, batch in points.items()],
        [
            ("compute-bound: prefills, tokens", "250-300", knee(lambda n: StepStats.of([(n, 0)]))),
            ("the same, decodes without KV", "300", knee(lambda n: StepStats(decode_requests=n))),
        ],
    )


def point(batch: StepStats) -> tuple[float, float, float]:
    """Return the time of a step in ms, its FLOP/byte and its TFLOP/s."""
    operators = Operators.of(MACHINE.shape, 1)
    gemms, head, attention = operators.layer_gemms, operators.lm_head, operators.attention
    tokens, requests = batch.compute_tokens, batch.prefill_requests + batch.decode_requests
    flops = (
        tokens * sum(gemm.row_flops for gemm in gemms)
        + requests * head.row_flops
        + attention.prefill_pair_flops * batch.prefill_attention_pairs
        + attention.decode_pair_flops * batch.decode_context_tokens
    )
    moved_bytes = (
        sum(gemm.weight_bytes + tokens * gemm.row_bytes for gemm in gemms)
        + head.weight_bytes
        + requests * head.row_bytes
        + attention.query_bytes * tokens
        + attention.key_bytes * batch.total_tokens
    )
    seconds = MACHINE.roofline().predict(batch)
    return seconds * 1e3, flops / moved_bytes, flops / seconds / 1e12


def table6(seconds: float) -> Iterator[Findings]:
    """Tokens/s when more requests come than can be served, first come, first served."""
    load = Workload(gamma_arriving(100.0, 1.0, AZURE_2024, seconds), interval_s=seconds)

    def tokens_per_s(testbed: Testbed, gemm_flop_s: float | None = None) -> float:
        setup = testbed.with_targets()
        if gemm_flop_s is not None:
            model = testbed.machine.roofline().with_coefficients({"gemm_flop_s": gemm_flop_s})
            setup = replace(setup, model=model)
        return simulate(load, setup, FcfsPolicy()).online_throughput.total_tokens_per_s

    h100 = tokens_per_s(replace(TESTBED, hardware="h100"))
    ascend = tokens_per_s(TESTBED)
    as_xllm = tokens_per_s(TESTBED, 1 / (XLLM_COMPUTE * MACHINE.hardware.bf16_flop_per_s))
    ratios = f"{h100 / ascend:.2f}x; {h100 / as_xllm:.2f}x"
    yield Findings(
        "Table 6",
        ("device", "paper, tokens/s", "tokens/s"),
        [
            ("H800; an H100", "vLLM 36,100", h100),
            ("910C", "vLLM 10,050, xLLM 12,083", ascend),
            (f"910C, GEMMs at {XLLM_COMPUTE:.0%} of its FLOP/s", "xLLM 12,083", as_xllm),
        ],
        [(f"H800's, times xLLM's 910C; at {XLLM_COMPUTE:.0%}", "2.99x", ratios)],
    )
