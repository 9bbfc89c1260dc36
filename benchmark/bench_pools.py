"""What pulled lines cost the online requests of a strict engine.

    python benchmark/bench_pools.py --cores 0 1 --out pools-report

A strict engine on the first core and a relaxed one on the second, a gateway before both. Online
requests go to the strict engine, directly. In each repeat they are measured, in an order that
changes: without any batch, twice, whose ratio is the noise; while a batch runs on the relaxed
engine alone, whose work the strict one feels only as that of another core; while beside it another
batch runs on the strict engine alone, as on an ordinary engine; and while the gateway pulls lines
from the relaxed to the strict engine. TTFT is wall time at the client. Exits with 1 when a target
is missed, and when no line was pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from common.batch_server import BatchServer, wait_until
from common.failures import RunFailedError, exit_status
from common.figures import Figure, all_met, report
from common.input_file import write_lines
from common.model import ServedModel, prepare_model
from fleet_bench.pinned_engine import gateway, pinned_engine
from router_bench.traffic import online_requests, unshared_requests

_BATCH_LINES: Final = 5000
"""More than are served while online requests are measured."""

_LENGTH_TOKENS: Final = (64, 400)
_WAIT_S: Final = 120.0
_POLL_S: Final = 0.2
_CASES: Final = ("alone", "alone again", "batch elsewhere", "lines of its own", "lines pulled")


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    return exit_status(lambda: all_met(run(options)), interrupted="")


def run(options: argparse.Namespace) -> list[Figure]:
    """Measure, and write what was measured."""
    options.out.mkdir(parents=True, exist_ok=True)
    p99_ms: dict[str, list[float]] = {case: [] for case in _CASES}
    pulled: list[float] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        model = prepare_model(options.model_path, work)
        flags = [
            *("--page-size", "16", "--kv-checkpoint", "eager", "--kv-move-dir", str(work / "kv")),
            *("--offline-policy", "ooco", "--slo-ttft-ms", str(options.ttft_ms)),
            *("--slo-tpot-ms", str(options.tpot_ms)),
            *options.server_flag,
        ]
        strict, relaxed = (
            stack.enter_context(
                pinned_engine(model.path, core, work / f"{pool}.log", "--pool", pool, *flags)
            )
            for core, pool in zip(options.cores, ("strict", "relaxed"), strict=True)
        )
        urls = [strict.base_url, relaxed.base_url]
        both = stack.enter_context(gateway(work / "both", urls))
        elsewhere = stack.enter_context(gateway(work / "elsewhere", urls[1:]))
        own = stack.enter_context(gateway(work / "own", urls[:1]))
        gateways = {
            "batch elsewhere": [elsewhere],
            "lines of its own": [elsewhere, own],
            "lines pulled": [both],
        }
        rng = random.Random(options.seed)
        for repeat in range(options.repeats):
            seed = rng.randrange(1 << 30)
            for case in rng.sample(_CASES, len(_CASES)):
                with ExitStack() as running:
                    for server in gateways.get(case, []):
                        running.enter_context(_batch(server, work, model, seed))
                    before = _pulled(both)
                    if case == "lines pulled":
                        wait_until(lambda: _pulled(both) > 0, _WAIT_S, "a line pulled", _POLL_S)
                    p99_ms[case].append(_p99_ttft_ms(strict.base_url, options, seed))
                    if case == "lines pulled":
                        pulled.append(_pulled(both) - before)
                print(f"bench_pools: {repeat + 1}: {case}: {p99_ms[case][-1]:.1f}", file=sys.stderr)
    figures = _figures(p99_ms, pulled)
    report(figures, options)
    return figures


@contextmanager
def _batch(server: BatchServer, work: Path, model: ServedModel, seed: int) -> Generator[None]:
    """Have a batch within; at the end it is cancelled, and nothing of it is in an engine."""
    source = work / "in.jsonl"
    write_lines(
        source,
        _BATCH_LINES,
        vocab_size=model.vocab_size,
        prompt_tokens=_LENGTH_TOKENS[0],
        output_tokens=_LENGTH_TOKENS[1],
        seed=seed,
    )
    batch_id = server.create(server.upload(source))
    try:
        yield
    finally:
        server.cancel(batch_id)


def _pulled(server: BatchServer) -> int:
    """Return how many lines a gateway has pulled so far."""
    answer = httpx.get(f"{server.base_url}/coserve/status", timeout=30.0, trust_env=False)
    return int(answer.raise_for_status().json()["fleet"]["lines_pulled"])


def _p99_ttft_ms(base_url: str, options: argparse.Namespace, seed: int) -> float:
    end_s = time.monotonic() + options.seconds
    sending = online_requests(
        base_url,
        unshared_requests(seed),
        per_s=options.rate,
        seed=seed,
        is_over=lambda: time.monotonic() > end_s,
    )
    answered = asyncio.run(sending)
    if answered.failures:
        raise RunFailedError(f"online requests failed: {answered.failures[:3]}")
    return 1e3 * float(np.percentile(answered.ttfts_s, 99))


def _figures(p99_ms: dict[str, list[float]], pulled: Sequence[float]) -> list[Figure]:
    def by(case: str, other: str) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(p99_ms[case], p99_ms[other], strict=True))

    return [
        *(Figure(f"P99 TTFT, {case}", "ms", tuple(p99_ms[case])) for case in _CASES),
        *(Figure(f"{case} ÷ alone", "", by(case, "alone")) for case in _CASES[1:]),
        Figure(
            "lines pulled ÷ lines of its own",
            "",
            by("lines pulled", "lines of its own"),
            at_most=1.1,
        ),
        Figure("lines pulled meanwhile", "", tuple(pulled), at_least=1),
    ]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--cores", type=int, nargs=2, default=[0, 1], help="of the strict and the relaxed engine")
    add("--rate", type=float, default=3.0, help="online requests a second, on average")
    add("--seconds", type=float, default=60.0, help="of each case in each repeat")
    add("--ttft-ms", type=float, default=100.0, help="what the strict engine is to hold")
    add("--tpot-ms", type=float, default=50.0, help="the same")
    add("--repeats", type=int, default=3)
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="one word of a flag")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("pools-report"), help="where everything goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
