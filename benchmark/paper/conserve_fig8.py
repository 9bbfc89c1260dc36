"""ConServe Fig. 8: burstiness (a), prompt length (b) and output length (c) of the online load.

    python benchmark/paper/conserve_fig8.py

The setting of Fig. 6(a) at 2 requests a second, one parameter changed at a time;
the rate falls as the length grows (§6.4).
"""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

from conserve_setting import (
    CHECKPOINT_BYTE_PER_S,
    CHUNK_TOKENS,
    FIGURES,
    SAFEPOINT_LAYERS,
    SYNTHETIC,
    figures,
    offline_per_s,
    own_targets,
    workload,
)
from harness import (
    Claim,
    Lengths,
    Testbed,
    main,
    p99_itl_ms,
    p99_ttft_ms,
    print_claims,
    print_table,
    run,
)

from sglang_coserve.core.policies.sarathi import SarathiPolicy
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator import SimulationResult, Workload
from sglang_coserve.simulator.assemble import Machine

MACHINE = Machine.named("llama-3.1-8b", "h100")
BASELINE = Testbed(MACHINE, prefix_cache=False)
CONSERVE = replace(
    BASELINE, checkpoint_byte_per_s=CHECKPOINT_BYTE_PER_S, safepoint_layers=SAFEPOINT_LAYERS
)
CVS = (0.5, 1.0, 2.0, 4.0)
PROMPTS = (1024, 2048, 8192, 16384)
OUTPUTS = (64, 128, 512, 1024)


def cases(seconds: float) -> dict[str, Workload]:
    """Return the workloads of the three parts."""

    def of(prompt_tokens: int, output_tokens: int) -> Workload:
        rate = 2.0 * (4096 + 256) / (prompt_tokens + output_tokens)
        return workload(rate, seconds, online=Lengths.fixed(prompt_tokens, output_tokens))

    loads = {f"(a) CV {cv:g}": workload(2.0, seconds, cv=cv, online=SYNTHETIC) for cv in CVS}
    loads |= {f"(b) prompt {tokens}": of(tokens, 256) for tokens in PROMPTS}
    return loads | {f"(c) output {tokens}": of(4096, tokens) for tokens in OUTPUTS}


def experiment(seconds: float, _trace: str | None) -> None:
    """Run every case under Online-Only, Sarathi-P and ConServe."""
    rows: list[tuple[object, ...]] = []
    ratios: list[tuple[float, float, float]] = []
    for name, load in cases(seconds).items():
        alone = run(load, BASELINE.setup(SloTargets()), "online_only")
        targets = own_targets(alone)
        sarathi = run(load, BASELINE.setup(targets), SarathiPolicy(CHUNK_TOKENS))
        ours = run(load, CONSERVE.setup(targets), "conserve")
        rows += ((f"{name} {r.policy}", *figures(r)) for r in (alone, sarathi, ours))
        if name.startswith("(a)"):
            ratios.append(gains(sarathi, ours))
    print_table("Fig. 8", ("case", *FIGURES), rows)
    ttft, tbt, offline = (geometric_mean(column) for column in zip(*ratios, strict=True))
    print_claims(
        [
            Claim(
                "(a) P99 TTFT and TBT below the best baseline, mean",
                "1.68x, 2.38x",
                f"{ttft:.2f}x, {tbt:.2f}x",
                "Sarathi-P is the only preemptive baseline here (DistServe-P left out)",
            ),
            Claim(
                "(a) offline above it, mean",
                "3.62x",
                f"{offline:.2f}x",
                "all policies here admit only what fits with headroom: Sarathi-P evicts less often",
            ),
        ]
    )


def gains(baseline: SimulationResult, ours: SimulationResult) -> tuple[float, float, float]:
    """Return how many times better ours is in P99 TTFT, P99 TBT and offline throughput."""
    return (
        p99_ttft_ms(baseline) / p99_ttft_ms(ours),
        p99_itl_ms(baseline) / p99_itl_ms(ours),
        offline_per_s(ours) / offline_per_s(baseline),
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=240.0)
