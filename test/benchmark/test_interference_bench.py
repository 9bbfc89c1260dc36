"""The tables and targets of ``bench_interference``."""

from __future__ import annotations

from interference_bench.report import held_to_stock
from interference_bench.systems import SYSTEMS


def row(system: str, ttft_ms: float, itl_ms: float, tokens_per_s: float) -> dict[str, object]:
    return {
        "system": system,
        "ttft_p99_ms": ttft_ms,
        "itl_p99_ms": itl_ms,
        "offline_tokens_per_s": tokens_per_s,
    }


def test_targets_are_a_share_of_what_the_stock_system_with_most_tokens_got() -> None:
    rows = [
        row("online alone", 10, 10, 0),
        row("coserve", 20, 20, 9000),
        row("stock, chunks of 128", 70, 14, 3000),
        row("stock, chunks of 256", 140, 28, 4000),
        row("stock, chunks of 256", 280, 56, 4200),
        row("stock, chunks of 256", 210, 42, 1000),
    ]
    held = held_to_stock(SYSTEMS["coserve, stock's P99s ÷ 1.4"], rows)
    assert held.coserve is not None
    assert held.coserve["slo"] == ("ttft p99 <= 150.000ms", "tbt p99 <= 30.000ms")
    assert held.coserve["offline_policy"] == "coserve"
