"""An hour of kills, storms and full disks on real servers: what is lost, doubled or different?

    python benchmark/chaos.py --minutes 60 --out chaos-report
    python benchmark/chaos.py --minutes 60 --engines 3 --router smg --out chaos-report-fleet

A server, or with ``--engines`` a gateway and its engines. Batches of several keys and online
streams run all the time, with ``--pictures`` also of images; their greedy answers are known from
the undisturbed server. Meanwhile a single server gets malformed requests, and its queue is often
full. It is hurt in one way after the other, and started again: killed, stopped, frozen, left
without disk, aborted, given its weights again, or robbed of the data that it had not synced.

In a fleet, engines and the gateway are killed, drained and frozen, connections are cut and adapters
unloaded, while the rest goes on. An engine with another model is there all the time. Online
requests go through ``--router``.

Writes ``results.json`` and ``table.md``; exits with 1 when a target is missed.
Ctrl-C ends the injuries, and the figures are those until then.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import chain, count
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any, Final

import orjson

from chaos_bench.adapter import make_adapter
from chaos_bench.answers import ADAPTER, CHAT, COMPLETIONS, known_answers
from chaos_bench.batches import DRAIN_TIMEOUT_S, Batches
from chaos_bench.figures import ChaosError, report
from chaos_bench.injuries import OF_A_FLEET, OF_A_SERVER, injuries_of
from chaos_bench.online import Probes, probe
from chaos_bench.router import Router
from chaos_bench.servers import Servers
from chaos_bench.storm import storm
from chaos_bench.verdict import Verdict, verdict
from chaos_bench.vision_model import make_vision_model
from sglang_coserve.errors import CoserveError
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import StoppableBar, terminate_as_interrupt

CORPUS: Final = Path(__file__).parents[1] / "test" / "srt" / "hostile" / "requests.py"
"""Requests that once ended or stalled a server, or might."""

_POLL_S: Final = 0.2
_ADAPTER_SHARE: Final = 0.2
"""Share of a fleet's requests that ask for the adapter."""

_ANSWER_TIMEOUT_S: Final = 240.0
"""Of what sends requests: more than one may take."""

_ROUTER_FLAGS: Final = ("--health-check-interval-secs", "1", "--disable-circuit-breaker")
"""As docs/fleet.md has them, but for the interval, with which every injury is noticed."""


def main(argv: Sequence[str]) -> int:
    """Run the command line; return 0 if targets are met, else 1; 2 after an error, 130 after
    Ctrl-C.
    """
    options = parse_options(argv)
    try:
        with terminate_as_interrupt():
            found = run(options)
    except CoserveError as error:
        reason, status = str(error), 2
    except KeyboardInterrupt:
        reason, status = "interrupted before all batches had ended", 130
    else:
        return int(any(figure.is_met is False for figure in found.figures))
    print(f"chaos: {reason}", file=sys.stderr)
    return status


def run(options: argparse.Namespace) -> Verdict:
    """Hurt servers for as long as asked, and judge them."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus() if options.storms else []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        model = _model(options, work)
        adapter = canary_model = None
        if options.engines:
            adapter = make_adapter(model, work / "adapter")
            canary_model = make_small_model(work / "canary", SmallModelSpec(seed=1))
        servers = stack.enter_context(
            Servers(
                _flags(options, model, adapter),
                work,
                out,
                engines=options.engines,
                canary_model=canary_model,
                adapter=adapter,
                spares_one=options.router is not None,
                seed=options.seed,
            )
        )
        engine_urls = [engine.base_url for engine in servers.engines]
        known = known_answers(
            engine_urls[0],
            options.known,
            options.seed,
            picture_share=options.pictures,
            adapter_share=_ADAPTER_SHARE if options.engines else 0.0,
        )
        online_url = engine_urls[0]
        if options.router:
            log = out / "router.log"
            router = Router(options.router, "cache_aware", engine_urls, log, *_ROUTER_FLAGS)
            online_url = stack.enter_context(router).base_url
        probes = Probes(
            online_url,
            [each for each in known if each.model == "default"],  # A router knows no adapters.
            options.seed,
            work / "end",
            servers.pid_file,
            # Only a router knows which of several engines is there.
            streams=options.streams if options.router or not options.engines else 0,
            # Longer than an engine is frozen or started again.
            stream_timeout_s=180.0 if options.engines else 20.0,
            asks_routes=not options.engines,
            stacks=out / "stacks.txt" if options.stacks else None,
        )
        stop, url = work / "stop", servers.keeper.base_url
        ignored = (signal.SIGINT, signal.SIG_IGN)  # We end what we started.
        pool = stack.enter_context(
            multiprocessing.get_context("spawn").Pool(2 + options.storms, signal.signal, ignored)
        )
        probing = pool.apply_async(probe, (probes,))
        sizes = (options.lines, options.unfinished, random.Random(options.seed))
        batches = pool.apply_async(Batches(url, known, _bodies(corpus), *sizes).run, (stop,))
        seeds = range(options.seed, options.seed + options.storms)
        storms = [pool.apply_async(storm, (url, corpus, seed, stop)) for seed in seeds]
        senders: list[AsyncResult[Any]] = [probing, batches, *storms]
        injuries = injuries_of(options.engines)

        def watch() -> None:
            servers.restart_ended()
            for sending in senders:
                if sending.ready():
                    sending.get()  # Raises the error of a sender that has failed.

        hurt_in_rounds(
            lambda name: servers.injure(name, injuries[name]),
            options.injuries,
            options,
            meanwhile=watch,
        )
        stop.touch()
        seen = [each for one in storms for each in _waited(one, servers, _ANSWER_TIMEOUT_S)]
        lines, calls = _waited(batches, servers, DRAIN_TIMEOUT_S + _ANSWER_TIMEOUT_S)
        probes.end.touch()
        seen += [*_waited(probing, servers, _ANSWER_TIMEOUT_S), *calls]
    found = verdict(servers, lines, seen)
    outages = [asdict(outage) for outage in servers.outages]
    report(found.figures, options, found.examples, injuries=servers.injuries, outages=outages)
    return found


def hurt_in_rounds(
    injure: Callable[[str], bool],
    names: Sequence[str],
    options: argparse.Namespace,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Injure in rounds, each with every name once, in an order of its own.

    The first round is whole; after it all ends with ``options.minutes``. Ctrl-C ends it after the
    injury under way, so that nothing stays frozen or full; a second one interrupts.

    Args:
        injure: Does what a name stands for; False if that cannot be done now, and it is asked for
            again.
        names: Of the injuries.
        options: Those of the command line.
        meanwhile: Called again and again between injuries.
    """
    rng = random.Random(options.seed)
    end_s = time.monotonic() + options.minutes * 60
    rounds = chain.from_iterable(rng.sample(names, len(names)) for _ in count())
    with StoppableBar(show=False) as stop:
        for number, name in enumerate(rounds):
            is_done = False
            while not is_done:
                wake_s = time.monotonic() + rng.uniform(*options.pause)
                while time.monotonic() < wake_s and not stop.is_interrupted:
                    time.sleep(_POLL_S)
                    meanwhile()
                left_s = end_s - time.monotonic()
                if stop.is_interrupted or (number >= len(names) and left_s <= 0):
                    print("no more injuries; waiting for the batches to end", file=sys.stderr)
                    return
                print(f"{max(0.0, left_s):.0f} s left: {name}", file=sys.stderr)
                is_done = injure(name)


def _waited(sending: AsyncResult[Any], servers: Servers, timeout_s: float) -> Any:
    """Return what a sending process returns; servers that end meanwhile are started again."""
    give_up_s = time.monotonic() + timeout_s
    while not sending.ready():
        if time.monotonic() > give_up_s:
            raise ChaosError("a process that sends requests has died, or does not end")
        servers.restart_ended()
        sending.wait(_POLL_S)
    return sending.get()


def _model(options: argparse.Namespace, work: Path) -> Path:
    if options.model_path is not None:
        return Path(options.model_path)
    if options.pictures:
        return make_vision_model(work / "model")
    return make_small_model(work / "model", SmallModelSpec())


def _flags(options: argparse.Namespace, model: Path, adapter: Path | None) -> list[str]:
    # The corpus names its model, and a line with another would fail its batch; a router sends a
    # completion to who serves its model.
    name = "default" if options.engines else "small"
    queue = [] if options.engines else ["--max-queued-requests", str(options.max_queued_requests)]
    flags = ["--model-path", str(model), "--served-model-name", name, "--log-level", "warning"]
    lora = [] if adapter is None else ["--enable-lora", "--lora-paths", f"{ADAPTER}={adapter}"]
    return [*flags, *queue, *lora, *options.server_flag]


def read_corpus() -> list[tuple[str, bytes]]:
    """Return paths and bodies of the requests of ``CORPUS``."""
    spec = importlib.util.spec_from_file_location("hostile_requests", CORPUS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up there.
    spec.loader.exec_module(module)
    return [(request.path, request.content) for request in module.corpus()]


def _bodies(corpus: Sequence[tuple[str, bytes]]) -> dict[str, list[dict[str, Any]]]:
    """Return what the lines of a batch may have for a body, JSON objects, by endpoint."""
    bodies: dict[str, list[dict[str, Any]]] = {COMPLETIONS: [], CHAT: []}
    for path, content in corpus:
        with suppress(orjson.JSONDecodeError):
            body = orjson.loads(content)
            if path in bodies and isinstance(body, dict):
                bodies[path].append(body)
    return bodies


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("chaos-report"), help="where everything goes")
    add("--seed", type=int, default=1)
    add("--minutes", type=float, default=60.0, help="each injury is done once, however few")
    add("--pause", type=float, nargs=2, default=(5.0, 25.0), metavar=("LOW", "HIGH"))
    add("--injuries", nargs="+", choices=[*OF_A_SERVER, *OF_A_FLEET], help="only these")
    add("--engines", type=int, default=0, help="a gateway and so many; default: one server")
    add("--router", type=Path, help="the command smg: a fleet's online requests go through it")
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="one word of a flag")
    add("--max-queued-requests", type=int, default=8, help="SGLang refuses what waits beyond it")
    add("--known", type=int, default=60, help="different prompts")
    add("--pictures", type=float, default=0.0, metavar="SHARE", help="of the requests, of 1")
    add("--lines", type=int, default=120, help="of a batch")
    add("--unfinished", type=int, default=4, help="batches at a time")
    add("--streams", type=int, default=2, help="online streams at a time")
    add("--stacks", action="store_true", help="stacks.txt: the server's, while a ping is late")
    add("--storms", type=int, help="senders of hostile requests; default: 2, of a fleet none")
    options = parser.parse_args(argv)
    known = injuries_of(options.engines)
    if unknown := [name for name in options.injuries or [] if name not in known]:
        parser.error(f"--injuries {', '.join(unknown)}: here there are {', '.join(known)}")
    options.injuries = options.injuries or list(known)
    if options.storms is None:
        options.storms = 0 if options.engines else 2
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
