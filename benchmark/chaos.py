"""An hour of kills, storms and full disks on a real server: what is lost, doubled or different?

    python benchmark/chaos.py --minutes 60 --out chaos-report

Batches of several keys and online streams run all the time; their greedy answers are known from
the undisturbed server. Meanwhile malformed requests arrive, and the server is killed, stopped,
frozen, starved of disk, aborted or given its weights again, or loses what it had not synced, one
after the other, and is started again. Writes ``results.json`` and
``table.md``; exits with 1 when a target is missed. Ctrl-C ends the run, and the figures are those
until then.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import orjson

from chaos_bench.answers import known_answers
from chaos_bench.batch_load import BatchLoad
from chaos_bench.flags import add_batch_flags, chaos_parser
from chaos_bench.prober import Prober
from chaos_bench.storm import HostileRequest, Storm
from chaos_bench.supervised_server import INJURIES, SupervisedServer
from chaos_bench.verdict import Verdict, verdict
from common.failures import exit_status
from common.figures import report
from common.input_file import COMPLETIONS
from common.model import prepare_model
from common.null_server import NullServer

CORPUS: Final = Path(__file__).parents[1] / "test" / "srt" / "hostile" / "requests.py"
"""Requests that once ended or stalled a server, or might."""


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    return exit_status(lambda: run(options).is_met, interrupted=" before anything was seen")


def run(options: argparse.Namespace) -> Verdict:
    """Hurt a server for as long as asked, and judge it."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(options.corpus)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = prepare_model(options.model_path, work)
        flags = ["--model-path", model.path, "--log-level", "warning", *options.server_flag]
        server = SupervisedServer(
            flags, work / "data", out / "server.log", options.ready_timeout, options.seed
        )
        with server, NullServer() as control:
            known = known_answers(server.base_url, options.known, options.seed)
            prober = Prober(server.base_url, control.base_url, known, options.streams, options.seed)
            batches = BatchLoad(server.base_url, known, options, _bodies(corpus))
            storms = [
                Storm(server.base_url, corpus, options.seed + number)
                for number in range(options.storms)
            ]
            prober.start()
            batches.start()
            for storm in storms:
                storm.start()
            _hurt(server, options, rng)
            for storm in storms:
                storm.stop()
            batches.stop()
            server.restart_if_ended()
            lines = batches.results(options.drain_timeout)
            seen = [*prober.stop(), *batches.seen]
            for storm in storms:
                seen += storm.seen
    found = verdict(
        seen,
        lines,
        outages=server.outages,
        full_disk=server.full_disk,
        injuries=sum(server.injuries.values()),
        unexpected_ends=server.unexpected_ends,
    )
    report(
        found.figures,
        options,
        found.examples,
        injuries=server.injuries,
        outages=[asdict(outage) for outage in server.outages],
        stalls=found.stalls,
    )
    return found


def _hurt(server: SupervisedServer, options: argparse.Namespace, rng: random.Random) -> None:
    """Injure the server again and again until the time is over, or Ctrl-C."""
    end_s = time.monotonic() + options.minutes * 60
    names = options.injuries or list(INJURIES)
    number = 0
    try:
        while time.monotonic() < end_s or (options.in_turn and number < len(names)):
            wake_s = time.monotonic() + rng.uniform(*options.pause)
            while time.monotonic() < wake_s:
                time.sleep(0.2)
                server.restart_if_ended()
            if time.monotonic() < end_s or options.in_turn:
                name = names[number % len(names)] if options.in_turn else rng.choice(names)
                number += 1
                left_s = max(0.0, end_s - time.monotonic())
                print(f"chaos: {left_s:.0f} s left: {name}", file=sys.stderr, flush=True)
                server.injure(name)
    except KeyboardInterrupt:
        print("chaos: interrupted; waiting for the batches to end", file=sys.stderr)


def read_corpus(path: Path) -> list[HostileRequest]:
    """Return the requests of a module like ``CORPUS``; none where there is no file."""
    if not path.exists():
        return []
    spec = importlib.util.spec_from_file_location("hostile_requests", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up there.
    spec.loader.exec_module(module)
    return list(module.corpus())


def _bodies(corpus: Sequence[HostileRequest]) -> list[dict[str, Any]]:
    """Return what the lines of a batch may have for a body: JSON objects."""
    bodies = []
    for request in corpus:
        with suppress(orjson.JSONDecodeError):
            body = orjson.loads(request.content)
            if request.path == COMPLETIONS and isinstance(body, dict):
                bodies.append(body)
    return bodies


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = chaos_parser(__doc__ or "", "chaos-report", (5.0, 25.0))
    add_batch_flags(parser)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0)
    add("--corpus", type=Path, default=CORPUS, metavar="REQUESTS.py")
    add("--streams", type=int, default=2, help="online streams at a time")
    add("--storms", type=int, default=2, help="senders of hostile requests")
    add(
        "--in-turn",
        action="store_true",
        help="injuries one after the other, each at least once, not at random",
    )
    add("--injuries", nargs="*", choices=list(INJURIES), default=[], help="only these")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
