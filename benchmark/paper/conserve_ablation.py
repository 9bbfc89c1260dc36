"""ConServe §6.5, ablation: its three mechanisms one by one on top of Sarathi-P.

    python benchmark/paper/conserve_ablation.py

The setting of Fig. 6(a) at 2 requests a second.
"""

from __future__ import annotations

from dataclasses import replace

from conserve_setting import (
    CHECKPOINT_BYTE_PER_S,
    CHUNK_TOKENS,
    FIGURES,
    SAFEPOINT_LAYERS,
    figures,
    offline_per_s,
    own_targets,
    workload,
)
from harness import Claim, Testbed, main, p99_itl_ms, p99_ttft_ms, print_claims, print_table, run

from sglang_coserve.core.policies.sarathi import SarathiPolicy
from sglang_coserve.metrics import SloTargets, latency_report
from sglang_coserve.simulator.assemble import Machine

MACHINE = Machine.named("llama-3.1-8b", "h100")


def experiment(seconds: float, _trace: str | None) -> None:
    """Run the four steps."""
    load = workload(2.0, seconds)
    plain = Testbed(MACHINE, prefix_cache=False)
    alone = run(load, plain.setup(SloTargets()), "online_only")
    targets = own_targets(alone)
    sarathi = run(load, plain.setup(targets), SarathiPolicy(CHUNK_TOKENS))
    aware = run(load, plain.setup(targets), "conserve")
    layered = replace(plain, safepoint_layers=SAFEPOINT_LAYERS)
    preempting = run(load, layered.setup(targets), "conserve")
    full = replace(layered, checkpoint_byte_per_s=CHECKPOINT_BYTE_PER_S)
    complete = run(load, full.setup(targets), "conserve")
    steps = (
        ("Online-Only", alone),
        ("Sarathi-P", sarathi),
        ("+ SLO-aware scheduler", aware),
        ("+ layer-wise preemption", preempting),
        ("+ incremental checkpoints", complete),
    )
    print_table("ablation", ("step", *FIGURES), ((name, *figures(step)) for name, step in steps))
    worst = [(latency_report(step.online).ttft.max_s or 0.0) * 1e3 for step in (aware, preempting)]
    gain = offline_per_s(complete) / offline_per_s(preempting)
    print_claims(
        [
            Claim("P99 TBT, Sarathi-P", "375 ms", f"{p99_itl_ms(sarathi):.0f} ms"),
            Claim(
                "P99 TBT, SLO-aware",
                "73 ms",
                f"{p99_itl_ms(aware):.0f} ms",
                "the target is Online-Only's own P99, which is lower here",
            ),
            Claim(
                "P99 TTFT, Sarathi-P, then SLO-aware",
                "1399, 686 ms",
                f"{p99_ttft_ms(sarathi):.0f}, {p99_ttft_ms(aware):.0f} ms",
                "what a real engine adds around its iterations is not modelled",
            ),
            Claim(
                "P99 TTFT with preemption",
                "523 ms (-24%)",
                f"{p99_ttft_ms(preempting):.0f} ms "
                f"({p99_ttft_ms(preempting) / p99_ttft_ms(aware) - 1:.0%})",
            ),
            Claim(
                "worst TTFT with preemption",
                "866 -> 573 ms (-34%)",
                f"{worst[0]:.0f} -> {worst[1]:.0f} ms ({worst[1] / worst[0] - 1:.0%})",
            ),
            Claim(
                "offline tokens/s with checkpoints",
                "8810 -> 11366 (1.29x)",
                f"{offline_per_s(preempting):,.0f} -> {offline_per_s(complete):,.0f} ({gain:.2f}x)",
                "admission with headroom evicts nobody at this load; see Fig. 6(a), 4 req/s",
            ),
        ]
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=240.0)
