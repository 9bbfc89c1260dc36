"""An hour of kills, storms and full disks on a real server: what is lost, doubled or different?

    python benchmark/chaos.py --minutes 60 --out chaos-report

Batches of several keys and online streams run all the time, with ``--pictures`` also of images;
their greedy answers are known from the undisturbed server. Meanwhile malformed requests arrive,
requests are refused by a full queue, and the server is killed, stopped, frozen, starved of disk,
aborted or given its weights again, or loses what it had not synced, one after the other, and is
started again. Writes ``results.json`` and ``table.md``; exits with 1 when a target is missed.
Ctrl-C ends the injuries, and the figures are those until then.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import orjson

from chaos_bench.answers import CHAT, COMPLETIONS, known_answers
from chaos_bench.batch_load import BatchLoad
from chaos_bench.figures import exit_status, report
from chaos_bench.prober import Prober, Probes
from chaos_bench.rounds import chaos_parser, hurt_in_rounds
from chaos_bench.storm import HostileRequest, Storm
from chaos_bench.supervised_server import INJURIES, SupervisedServer
from chaos_bench.verdict import Verdict, verdict
from chaos_bench.vision_model import make_vision_model
from sglang_coserve.small_model import SmallModelSpec, make_small_model

CORPUS: Final = Path(__file__).parents[1] / "test" / "srt" / "hostile" / "requests.py"
"""Requests that once ended or stalled a server, or might."""


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    return exit_status(lambda: run(options).figures)


def run(options: argparse.Namespace) -> Verdict:
    """Hurt a server for as long as asked, and judge it."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = options.model_path or str(
            _made(work / "model", takes_pictures=options.pictures > 0)
        )
        flags = [
            # The corpus names this model: a line with another would fail its batch.
            *("--model-path", model, "--served-model-name", "small", "--log-level", "warning"),
            *("--max-queued-requests", str(options.max_queued_requests)),
            *options.server_flag,
        ]
        server = SupervisedServer(flags, work / "data", out / "server.log", options.seed)
        with server:
            known = known_answers(server.base_url, options.known, options.seed, options.pictures)
            prober = Prober(
                Probes(
                    server.base_url,
                    known,
                    options.seed,
                    streams=options.streams,
                    asks_routes=True,
                )
            )
            batches = BatchLoad(server.base_url, known, options, _bodies(corpus))
            storms = [
                Storm(server.base_url, corpus, options.seed + number)
                for number in range(options.storms)
            ]
            prober.start()
            batches.start()
            for storm in storms:
                storm.start()
            hurt_in_rounds(
                server.injure, options.injuries, options, meanwhile=server.restart_if_ended
            )
            for storm in storms:
                storm.stop()
            batches.stop()
            server.restart_if_ended()
            lines = batches.results()
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
    )
    return found


def _made(directory: Path, *, takes_pictures: bool) -> Path:
    if takes_pictures:
        return make_vision_model(directory)
    return make_small_model(directory, SmallModelSpec())


def read_corpus() -> list[HostileRequest]:
    """Return the requests of ``CORPUS``."""
    spec = importlib.util.spec_from_file_location("hostile_requests", CORPUS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up there.
    spec.loader.exec_module(module)
    return list(module.corpus())


def _bodies(corpus: Sequence[HostileRequest]) -> dict[str, list[dict[str, Any]]]:
    """Return what the lines of a batch may have for a body, JSON objects, by endpoint."""
    bodies: dict[str, list[dict[str, Any]]] = {COMPLETIONS: [], CHAT: []}
    for request in corpus:
        with suppress(orjson.JSONDecodeError):
            body = orjson.loads(request.content)
            if request.path in bodies and isinstance(body, dict):
                bodies[request.path].append(body)
    return bodies


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = chaos_parser(__doc__ or "", "chaos-report", (5.0, 25.0), INJURIES)
    add = parser.add_argument
    add("--pictures", type=float, default=0.0, metavar="SHARE", help="of the requests, of 1")
    add("--max-queued-requests", type=int, default=8, help="SGLang refuses what waits beyond it")
    add("--streams", type=int, default=2, help="online streams at a time")
    add("--storms", type=int, default=2, help="senders of hostile requests")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
