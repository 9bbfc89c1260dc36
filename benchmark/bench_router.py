"""Online requests through real routers to two engines, one of them full of offline work.

    python benchmark/bench_router.py --smg .../bin/smg --sglang-router .../bin/sglang-router \
        --out benchmark/results/router_cpu.json

Routers are not installed with the project: give the paths of their commands. For each router and
policy the same requests are sent twice, with both engines idle and with the first one full of
offline work. The part of them that the first engine answers should be the same: its offline work
gives way. TTFT is measured at the client; on a machine whose cores the engines share, offline work
of one delays the other, too.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.results import write_results
from router_bench.router import Router
from router_bench.traffic import (
    OnlineRun,
    full_of_offline_work,
    online_requests,
    unshared_requests,
)
from sglang_coserve.local_server import LocalServer
from sglang_coserve.small_model import SmallModelSpec, make_small_model

SMG: Final[Mapping[str, tuple[str, ...]]] = {
    "cache_aware": (),
    "least_load": (),
    "power_of_two": (),
    "power_of_two requests": ("--power-of-two-load-metric", "requests"),
    "power_of_two least_requests": ("--power-of-two-load-metric", "least_requests"),
    "round_robin": (),
}
SGLANG_ROUTER: Final[Mapping[str, tuple[str, ...]]] = {"cache_aware": (), "power_of_two": ()}
"""Policies, with the flags beside them."""

ENGINES: Final = ("first", "second")
_MODEL: Final = SmallModelSpec(hidden=64, layers=2, context=1024)
"""Two engines, a router and the client share a few cores: the less one computes, the less it is
in the way of the others."""

_KV_TOKENS: Final = 4096
_OFFLINE_REQUESTS: Final = 24


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder)
        model = options.model or str(make_small_model(work / "model", _MODEL))
        urls = [
            stack.enter_context(
                LocalServer(
                    engine_flags(model, name),
                    log_path=work / f"{name}.log",
                    extra_env={"OMP_NUM_THREADS": "1"},
                )
            ).base_url
            for name in ENGINES
        ]
        for name, program, policy, flags in track(
            list(cases(options)), "policies", console=Console(stderr=True)
        ):
            log_path = work / "router.log"
            with Router(program, policy.split()[0], urls, log_path, *flags) as router:
                for state in ("idle", "full"):
                    run = asyncio.run(measured(router.base_url, urls[0], state, options))
                    figures = figures_of(run)
                    rows.append({"router": name, "policy": policy, "first": state, **figures})
            write_results(options.out, options, rows=rows)
    print_table(rows)


def engine_flags(model: str, name: str) -> list[str]:
    """Return the flags of one engine."""
    return [
        *("--model-path", model, "--dtype", "float32", "--weight-version", name),
        *("--max-total-tokens", str(_KV_TOKENS), "--enable-metrics"),
    ]


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Path, str, tuple[str, ...]]]:
    """Yield router, command, policy and flags of each case."""
    for policy, flags in _chosen(SMG, options.smg, options.policies):
        interval = ("--load-monitor-interval", str(options.load_interval_s))
        yield "smg", options.smg, policy, (*flags, *interval)
    for policy, flags in _chosen(SGLANG_ROUTER, options.sglang_router, options.policies):
        yield "sglang-router", options.sglang_router, policy, flags


def _chosen(
    policies: Mapping[str, tuple[str, ...]], program: Path | None, names: Sequence[str]
) -> list[tuple[str, tuple[str, ...]]]:
    if program is None:
        return []
    return [(name, flags) for name, flags in policies.items() if not names or name in names]


async def measured(
    router_url: str, engine_url: str, state: str, options: argparse.Namespace
) -> OnlineRun:
    """Return what came of the online requests with the first engine in this state."""
    async with AsyncExitStack() as stack:
        if state == "full":
            full = full_of_offline_work(engine_url, requests=_OFFLINE_REQUESTS)
            await stack.enter_async_context(full)
            # The router is to have seen it.
            await asyncio.sleep(2 * options.load_interval_s)
        end_s = time.monotonic() + options.seconds
        return await online_requests(
            router_url,
            unshared_requests(options.seed),
            per_s=options.rate,
            seed=options.seed,
            is_over=lambda: time.monotonic() > end_s,
        )


def figures_of(run: OnlineRun) -> dict[str, Any]:
    """Return the split, and percentiles of TTFT."""
    by_engine, ttfts_s = run.by_engine, run.ttfts_s
    return {
        "requests": len(run.answers),
        "failed": len(run.failures),
        "failures": run.failures[:3],
        "share_of_first": by_engine[ENGINES[0]] / by_engine.total() if by_engine else None,
        "ttft_p50_ms": 1e3 * float(np.percentile(ttfts_s, 50)) if ttfts_s else None,
        "ttft_p99_ms": 1e3 * float(np.percentile(ttfts_s, 99)) if ttfts_s else None,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what the first engine got in either state, and how TTFT changed."""
    table = Table(title="Online requests that the first of two engines answers")
    for heading in ("router", "policy", "both idle", "first full", "P99 TTFT ÷ idle", "failed"):
        table.add_column(heading, justify="left" if heading in ("router", "policy") else "right")
    for idle, full in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(
            idle["router"],
            idle["policy"],
            f"{idle['share_of_first']:.1%}",
            f"{full['share_of_first']:.1%}",
            f"{full['ttft_p99_ms'] / idle['ttft_p99_ms']:.2f}",
            str(idle["failed"] + full["failed"]),
        )
    Console(width=110).print(table)


def parse_options() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smg", type=Path, help="the command smg")
    parser.add_argument("--sglang-router", type=Path, help="the command sglang-router")
    parser.add_argument(
        "--policies",
        nargs="*",
        default=(),
        choices=[*SMG],
        help="only these (default: all)",
    )
    parser.add_argument("--model", help="a folder or a hub name (default: a small random one)")
    parser.add_argument("--rate", type=float, default=6.0, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument(
        "--load-interval-s", type=int, default=2, help="how often smg asks for loads (default 2)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not (options.smg or options.sglang_router):
        parser.error("give --smg or --sglang-router: nothing is in front of the engines else")
    return options


if __name__ == "__main__":
    main()
