"""Kills of a Ray Data job, its raylet and its engines: what is lost, doubled or different?

    python benchmark/ray_chaos.py --lines 10000 --injuries 6 --out ray-chaos-report

Engines as processes, and one job whose greedy answers are known from an undisturbed engine. The
driver, the raylet and an engine are killed (SIGKILL) in turn, and started again. Writes
``results.json`` and ``table.md``; exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from chaos_bench.answers import KnownAnswer, known_answers
from chaos_bench.flags import chaos_parser
from common.failures import exit_status
from common.figures import Figure, all_met, report
from common.input_file import COMPLETIONS, completion_body
from common.model import prepare_model
from ray_bench.job_process import JobProcess
from sglang_coserve.local_server import LocalServer

_KEY: Final = "the engines' admin key"
_KINDS: Final = ("driver", "raylet", "engine")
_POLL_S: Final = 0.2


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    return exit_status(lambda: all_met(run(options)), interrupted="")


def run(options: argparse.Namespace) -> list[Figure]:
    """Hurt a job as often as asked, and judge its results."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        model = prepare_model(options.model_path, work)
        flags = ["--model-path", model.path, "--log-level", "warning", "--admin-api-key", _KEY]
        engines = [
            stack.enter_context(
                LocalServer(
                    [*flags, *options.server_flag],
                    log_path=work / f"engine-{number}.log",
                    ready_timeout_s=options.ready_timeout,
                    extra_env={"OMP_NUM_THREADS": "1"},
                )
            )
            for number in range(options.engines)
        ]
        known = known_answers(engines[0].base_url, options.known, options.seed)
        _write_requests(work / "requests.jsonl", known, options.lines)
        urls = [engine.base_url for engine in engines]
        job = JobProcess(work, urls, admin_key=_KEY, cpus=options.cpus)
        start_s = time.monotonic()
        with job:
            injuries = _hurt(job, engines, work / "results", options)
            job.wait(options.timeout)
        span_s = time.monotonic() - start_s
        figures = [
            *(Figure(f"kill -9 of the {kind}", "", (injuries[kind],)) for kind in _KINDS),
            Figure("starts of the job", "", (job.num_starts,)),
            *_judged(work / "results", known, options.lines),
            Figure("time", "s", (span_s,)),
        ]
    report(figures, options)
    return figures


def _hurt(
    job: JobProcess, engines: Sequence[LocalServer], results: Path, options: argparse.Namespace
) -> Counter[str]:
    """Kill one after the other, until that was often enough or the job is complete.

    Each time after the job has written some results.
    """
    rng = random.Random(options.seed)
    done: Counter[str] = Counter()
    kinds = options.kinds or _KINDS
    while done.total() < options.injuries:
        num_before = _num_files(results)
        while job.is_running and _num_files(results) == num_before:
            time.sleep(_POLL_S)
        deadline_s = time.monotonic() + rng.uniform(*options.pause)
        while job.is_running and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if not job.is_running:
            break  # Complete, or failed: ``wait`` tells.
        kind = kinds[done.total() % len(kinds)]
        if kind == "engine":
            engine = rng.choice(engines)
            engine.kill()
            engine.start()
        elif job.kill(kind):
            job.start()
        else:
            continue
        done[kind] += 1
        print(f"ray_chaos: {done.total()} of {options.injuries}: {kind}", file=sys.stderr)
    return done


def _num_files(directory: Path) -> int:
    return sum(1 for _ in directory.glob("*.parquet"))


def _write_requests(path: Path, known: Sequence[KnownAnswer], count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            answer = known[number % len(known)]
            body = completion_body(answer.prompt, answer.max_tokens)
            line = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
            file.write(json.dumps(line) + "\n")


def _judged(results: Path, known: Sequence[KnownAnswer], count: int) -> list[Figure]:
    rows = Counter[str]()
    failed = different = 0
    for row in pq.read_table(results).to_pylist():
        rows[row["line"].rpartition(":")[2]] += 1
        if row["error"] is not None:
            failed += 1
        else:
            text = json.loads(row["response"])["choices"][0]["text"]
            different += text != known[int(row["custom_id"]) % len(known)].text
    return [
        Figure("lines", "", (count,)),
        Figure("lines lost", "", (count - len(rows),), at_most=0),
        Figure("lines doubled", "", (rows.total() - len(rows),), at_most=0),
        Figure("lines failed", "", (failed,), at_most=0),
        Figure("lines different", "", (different,), at_most=0),
    ]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = chaos_parser(__doc__ or "", "ray-chaos-report", (20.0, 40.0))
    add = parser.add_argument
    add("--lines", type=int, default=10_000)
    add("--injuries", type=int, default=6, help="at most how many, of the kinds in turn")
    add("--kinds", nargs="*", choices=_KINDS, default=[], help="only these")
    add("--engines", type=int, default=2)
    add("--cpus", type=int, default=2, help="logical CPUs that Ray is told of")
    add("--timeout", type=float, default=3600.0, metavar="S", help="for the job to be complete")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
