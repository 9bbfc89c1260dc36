"""BROS Fig. 12: attainment with KV kept for preempted BE requests, and with recomputation.

    python benchmark/paper/bros_fig12.py

Qwen2.5-32B on four A100s of 40 GB, 10 RT requests a second (§VII-D). The
bidirectional block layout itself is not modelled: with it, what RT takes from
BE is copied to the host and comes back; without, it is computed again.
"""

from __future__ import annotations

from dataclasses import replace

from bros_fig9_10 import SWAP_BYTE_PER_S, TARGETS, TPOT, TTFT, hybrid, share
from harness import Claim, Testbed, main, print_claims, print_table, run

from sglang_coserve.simulator.assemble import Machine

MACHINE = Machine.named("qwen2.5-32b", "a100", tp_size=4)
KV_TOKENS = 300_000
"""Of 4 x 40 GB: 90% less 65 GB of weights, at 256 KiB a token."""


def experiment(seconds: float, _trace: str | None) -> None:
    """Run both."""
    without = Testbed(MACHINE, kv_tokens=KV_TOKENS, prefix_cache=False)
    kept = replace(without, checkpoint_byte_per_s=SWAP_BYTE_PER_S)
    load = hybrid(10.0, seconds)
    results = {
        "recomputation": run(load, without.setup(TARGETS), "bros"),
        "KV kept": run(load, kept.setup(TARGETS), "bros"),
    }
    rows = (
        (
            name,
            100 * share(result, TTFT),
            100 * share(result, TPOT),
            result.counters.evictions,
            result.recomputed_tokens,
        )
        for name, result in results.items()
    )
    head = ("what RT takes from BE", "TTFT SLO %", "TPOT SLO %", "evictions", "recomputed tokens")
    print_table("Fig. 12", head, rows)
    before, after = results.values()
    why = "BE pays for what it lost, not RT: the order protects the targets of RT either way"
    print_claims(
        Claim(
            f"{name} attainment with KV kept",
            paper,
            f"{share(after, of) / share(before, of):.2f}x",
            why,
        )
        for name, paper, of in (("TTFT", "1.23x", TTFT), ("TPOT", "1.63x", TPOT))
    )


if __name__ == "__main__":
    main(experiment, __doc__, seconds=120.0)
