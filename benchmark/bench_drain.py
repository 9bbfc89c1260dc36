"""Takes an engine full of running lines out: how long, and what is computed again?

    python benchmark/bench_drain.py --lines 64 --out drain-report
    python benchmark/bench_drain.py --moves-kv --prompt-words 600 --out drain-report

Two engines as processes. All lines run on the first, which is then drained by POST and told to
end; they go on on the second after the tokens that were handed back. Afterwards that one serves
them from their beginning: the answers must be the same. With ``--moves-kv`` all of it once more,
on engines that leave KV for each other. Writes ``results.json`` and ``table.md``; exits with 1
when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import httpx

from common.failures import exit_status
from common.figures import Figure, all_met, markdown
from common.model import prepare_model
from common.results import write_results
from sglang_coserve.errors import CoserveError
from sglang_coserve.http_lines import EngineConnection, LineMovedError
from sglang_coserve.lines.backend import LineRequest, LineResult, MovedKv
from sglang_coserve.local_server import LocalServer

_KEY = "the engines' admin key"
_TIMEOUT_S = 600.0
_WORDS = ["mill", "river", "boat", "rain", "lamp", "harbour", "engine", "paper", "stone", "garden"]


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    return exit_status(lambda: all_met(run(options)), interrupted="")


def run(options: argparse.Namespace) -> list[Figure]:
    """Measure one drain, or two, and write what came of it."""
    figures = _drained(options, moves_kv=False)
    if options.moves_kv:
        figures += [
            replace(figure, name=f"with KV: {figure.name}")
            for figure in _drained(options, moves_kv=True)
        ]
    options.out.mkdir(parents=True, exist_ok=True)
    write_results(
        options.out / "results.json", options, figures=[figure.to_dict() for figure in figures]
    )
    table = markdown(figures)
    (options.out / "table.md").write_text(table + "\n")
    print(table)
    return figures


def _drained(options: argparse.Namespace, *, moves_kv: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = prepare_model(options.model_path, work)
        flags = ["--model-path", model.path, "--dtype", "float32", "--log-level", "warning"]
        flags += ["--admin-api-key", _KEY, "--enable-cache-report", *options.server_flag]
        if options.moves_kv:
            flags += ["--page-size", "16", "--kv-checkpoint", "eager"]
        if moves_kv:
            flags += ["--kv-move-dir", str(work / "kv")]
        engines = [
            LocalServer(
                flags,
                log_path=work / f"engine-{number}.log",
                ready_timeout_s=_TIMEOUT_S,
                extra_env={"OMP_NUM_THREADS": "1"},
            )
            for number in range(2)
        ]
        with engines[0] as first, engines[1] as second:
            return asyncio.run(
                asyncio.wait_for(_measure(first, second, model.path, options), _TIMEOUT_S)
            )


async def _measure(
    first: LocalServer, second: LocalServer, model_path: str, options: argparse.Namespace
) -> list[Figure]:
    bodies = _bodies(model_path, options)
    async with (
        EngineConnection(first.base_url, _KEY) as source,
        EngineConnection(second.base_url, _KEY) as target,
    ):
        model = (await source.describe()).model
        received: list[list[int]] = [[] for _ in bodies]
        moved_s: list[float] = []
        left: list[MovedKv | None] = [None] * len(bodies)

        async def attempt(number: int) -> LineResult | None:
            try:
                request = _request(bodies[number], number)
                return await source.run(request, model, received[number].extend)
            except LineMovedError as error:
                left[number] = error.kv
                moved_s.append(time.monotonic())
                return None

        attempts = [asyncio.ensure_future(attempt(number)) for number in range(len(bodies))]
        while min(map(len, received)) < options.tokens_before:
            await asyncio.sleep(0.05)
        begun_s = time.monotonic()
        state = await asyncio.to_thread(_drain, first)
        empty_s = time.monotonic()
        ended = await asyncio.gather(*attempts)
        assert state["requests"] == 0, state
        exit_s = await asyncio.to_thread(_end, first)

        moved = [number for number, result in enumerate(ended) if result is None]
        goes_on_s = time.monotonic()
        first_s: dict[int, float] = {}

        def regained(number: int) -> Callable[[Sequence[int]], None]:
            def on_first(_tokens: Sequence[int]) -> None:
                first_s.setdefault(number, time.monotonic() - goes_on_s)

            return on_first

        rest = await asyncio.gather(
            *(
                target.run(_request(bodies[n], n, received[n], left[n]), model, regained(n))
                for n in moved
            )
        )
        whole = await asyncio.gather(
            *(target.run(_request(bodies[n], n), model, lambda _: None) for n in moved)
        )
    again = [_again(result, received[n]) for n, result in zip(moved, rest, strict=True)]
    different = sum(
        a.body["choices"] != b.body["choices"] for a, b in zip(rest, whole, strict=True)
    )
    tokens = [len(received[n]) for n in moved]
    return [
        Figure("lines running", "", (len(bodies),)),
        Figure("lines handed back", "", (len(moved),)),
        Figure("lines lost", "", (sum(not result.is_ok for result in rest),), at_most=0),
        Figure("lines different", "", (different,), at_most=0),
        Figure("until the last was handed back", "s", (max(moved_s) - begun_s,)),
        Figure("until the engine was empty", "s", (empty_s - begun_s,)),
        Figure("from SIGTERM to the end of the process", "s", (exit_s,)),
        Figure("tokens handed back of a line", "", (sum(tokens) / len(tokens),)),
        Figure("lines whose KV was left", "", (sum(kv is not None for kv in left),)),
        Figure("until half of the lines had new tokens", "s", (median(first_s.values()),)),
        Figure("until all lines had new tokens", "s", (max(first_s.values()),)),
        Figure("tokens computed again of a line", "", (sum(again) / len(again),)),
        Figure("most tokens computed again of a line", "", (max(again),)),
    ]


def _bodies(model_path: str, options: argparse.Namespace) -> list[dict[str, object]]:
    rng = random.Random(options.seed)
    return [
        {
            "model": model_path,
            "prompt": f"{number} " + " ".join(rng.choices(_WORDS, k=options.prompt_words)),
            "max_tokens": options.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for number in range(options.lines)
    ]


def _request(
    body: dict[str, object],
    number: int,
    generated: Sequence[int] = (),
    kv: MovedKv | None = None,
) -> LineRequest:
    deadline_s = time.time() + 24 * 3600
    where = ("batch_1", number, "/v1/completions", dict(body))
    return LineRequest(*where, tuple(generated), deadline_s, kv=kv)


def _again(result: LineResult, generated: Sequence[int]) -> int:
    """Tokens of prompt and output that the second engine computed though the first one had."""
    usage = result.body["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return int(usage["prompt_tokens"]) + len(generated) - int(details.get("cached_tokens") or 0)


def _drain(engine: LocalServer) -> dict[str, int]:
    headers = {"authorization": f"Bearer {_KEY}"}
    answer = httpx.post(
        f"{engine.base_url}/coserve/drain?wait_s=60", headers=headers, timeout=90, trust_env=False
    )
    state: dict[str, int] = answer.raise_for_status().json()
    return state


def _end(engine: LocalServer) -> float:
    """Send SIGTERM; return how long it took to end, in order."""
    began_s = time.monotonic()
    os.kill(engine.pid, signal.SIGTERM)
    status = engine.wait(_TIMEOUT_S)
    if status != 0:
        raise CoserveError(f"the engine ended with status {status}; {engine.log_tail()}")
    return time.monotonic() - began_s


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--lines", type=int, default=64, help="that run at a time")
    add("--prompt-words", type=int, default=60)
    add("--output-tokens", type=int, default=400)
    add("--tokens-before", type=int, default=60, help="that each has when the drain begins")
    add("--moves-kv", action="store_true", help="KV checkpoints on; once more, with KV moved")
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="one word of a flag")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("drain-report"), help="where everything goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
