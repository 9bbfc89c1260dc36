"""What engines do together: tokens/s of one batch over several of them, by those of one.

    python benchmark/bench_fleet.py --cores 0 1 --out fleet.json

An engine per core, with fp32 kernels of one thread. In each repeat three things are measured, in
an order that changes: a batch on the first engine alone; a batch of as many lines for each engine
on all of them, over one gateway; and as many batches at a time as there are engines, each over a
gateway of its own to one engine. The last one is what the machine has to give while all cores
work: the second divided by it is what one gateway loses. Lines have different prompts, and all of
a length. Gateways share the cores with the engines.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.batch_server import BatchServer
from common.failures import exit_status
from common.figures import Figure, all_met, report
from common.input_file import write_lines
from common.model import ServedModel, prepare_model
from fleet_bench.pinned_engine import gateway, pinned_engine

_BATCH_S: Final = 1200.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Gateway:
    server: BatchServer
    num_engines: int


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    return exit_status(lambda: all_met(run(options)), interrupted="")


def run(options: argparse.Namespace) -> list[Figure]:
    """Measure, and write what was measured."""
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[float]] = {"one": [], "together": [], "apart": []}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        model = prepare_model(options.model_path, work)
        urls = [
            stack.enter_context(
                pinned_engine(model.path, core, work / f"engine-{core}.log", *options.server_flag)
            ).base_url
            for core in options.cores
        ]
        apart = [
            stack.enter_context(gateway(work / f"gateway-{number}", [url]))
            for number, url in enumerate(urls)
        ]
        together = stack.enter_context(gateway(work / "gateway", urls))
        measured = {
            "one": [_Gateway(apart[0], 1)],
            "together": [_Gateway(together, len(urls))],
            "apart": [_Gateway(server, 1) for server in apart],
        }
        rng = random.Random(options.seed)
        _served(measured["apart"], work, model, options, rng)  # Warms up.
        for repeat in range(options.repeats):
            for name in rng.sample(list(measured), len(measured)):
                tokens_per_s = _served(measured[name], work, model, options, rng)
                found[name].append(tokens_per_s)
                print(f"bench_fleet: {repeat + 1}: {name}: {tokens_per_s:.0f}", file=sys.stderr)
    figures = _figures(found, len(options.cores))
    report(figures, options)
    return figures


def _served(
    gateways: Sequence[_Gateway],
    work: Path,
    model: ServedModel,
    options: argparse.Namespace,
    rng: random.Random,
) -> float:
    """Serve a batch over each gateway at the same time; return their output tokens a second."""
    seeds = [rng.randrange(1 << 30) for _ in gateways]

    def tokens_per_s(number: int) -> float:
        each, source = gateways[number], work / f"in-{number}.jsonl"
        lines: int = options.lines * each.num_engines
        write_lines(
            source,
            lines,
            vocab_size=model.vocab_size,
            prompt_tokens=options.length[0],
            output_tokens=options.length[1],
            seed=seeds[number],
        )
        start_s = time.monotonic()
        batch_id = each.server.create(each.server.upload(source))
        each.server.until(batch_id, "completed", timeout_s=_BATCH_S, poll_s=_POLL_S)
        output_tokens: int = lines * options.length[1]
        return output_tokens / (time.monotonic() - start_s)

    with ThreadPoolExecutor() as threads:
        return sum(threads.map(tokens_per_s, range(len(gateways))))


def _figures(found: dict[str, list[float]], num_engines: int) -> list[Figure]:
    by_one = [a / b for a, b in zip(found["together"], found["one"], strict=True)]
    by_apart = [a / b for a, b in zip(found["together"], found["apart"], strict=True)]
    unit = "output tokens/s"
    return [
        Figure("one engine", unit, tuple(found["one"])),
        Figure(f"{num_engines} engines, one gateway", unit, tuple(found["together"])),
        Figure(f"{num_engines} engines, a gateway each", unit, tuple(found["apart"])),
        Figure("one gateway ÷ one engine", "", tuple(by_one)),
        Figure("one gateway ÷ a gateway each", "", tuple(by_apart), at_least=0.95),
    ]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--cores", type=int, nargs="+", default=[0, 1], help="an engine on each")
    add("--lines", type=int, default=400, help="for each engine")
    add("--length", type=int, nargs=2, default=(256, 64), metavar="TOKENS", help="input, output")
    add("--repeats", type=int, default=3)
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="one word of a flag")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("fleet-report"), help="where everything goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
