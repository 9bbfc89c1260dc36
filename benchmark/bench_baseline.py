"""The no-interference baseline of a co-served run, beside a run without offline load.

One engine on a CPU, in this process, whose clock is the CPU time of its thread, so that other
work on the machine does not count. Requests arrive on that clock (Poisson), during a forward
pass, too; while nothing is to do it skips to the next arrival. For each load the same online
requests run alone, then beside a backlog of offline ones.

    python benchmark/bench_baseline.py MODEL prompt --rates 0.5,1.2,2
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "test"))

TRACES = {"prompt": ((256, 1024), (8, 16)), "output": ((16, 64), (32, 96))}
"""Tokens of prompts and outputs, from and to."""

_OFFLINE = (512, 32)
_AT_ONCE = 16
_WARM_UP_S = 10.0
"""Not judged: the first steps of a process are slow, and the controller knows nothing."""


class Clock:
    """CPU time of this thread, and what was skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return time.thread_time() + self._skipped_s

    def skip_to(self, at_s: float) -> None:
        """Let time pass in which nothing is done."""
        self._skipped_s += max(0.0, at_s - self())


@dataclass
class Online:
    """What an online request got."""

    rid: str
    arrival_s: float
    prompt: list[int]
    tokens: int
    times_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)


class Run:
    """One run on an engine: its script, and what came of it."""

    def __init__(self, engine: Any, clock: Clock, online: list[Online], *, offline: bool) -> None:
        self.offline_tokens = 0
        self._engine = engine
        self._clock = clock
        self.online = {request.rid: request for request in online}
        self._pending = list(online)
        self._end_s = online[-1].arrival_s
        self._has_offline = offline
        self._offline: set[str] = set()
        self._counts: dict[str, int] = defaultdict(int)
        self._rng = random.Random(7)
        self._announced: set[str] = set()

    def announce(self) -> None:
        """Let a pass see who has arrived during it."""
        if not self._pending or self._pending[0].arrival_s > (now_s := self._clock()):
            return
        safepoints = self._engine.scheduler.parts.runner.safepoints
        if safepoints is None:
            return
        from sglang_coserve.srt.safepoint.inbox import Arrival

        for request in self._pending:
            if request.arrival_s > now_s or request.rid in self._announced:
                continue
            self._announced.add(request.rid)
            arrival = Arrival(request.rid, len(request.prompt), request.arrival_s, now_s, None)
            safepoints._watch._inbox.put(None, (arrival,))
        safepoints._watch.consider()

    def script(self, _: int) -> list[Any]:
        """Return what arrives now; skip time in which nothing is to do."""
        engine, scheduler = self._engine, self._engine.scheduler
        safepoints = scheduler.parts.runner.safepoints
        if safepoints is not None:
            safepoints._watch._inbox._messages.clear()
        is_over = all(self._has_all(request) for request in self.online.values())
        if is_over:
            if self._offline:
                self._offline.clear()
                return [engine.abort(abort_all=True)]
            raise StopIteration
        messages = []
        while self._pending and self._pending[0].arrival_s <= self._clock():
            request = self._pending.pop(0)
            messages.append(engine.request(request.rid, request.prompt, request.tokens))
        if self._has_offline:
            self._offline = {rid for rid in self._offline if not self._has_ended(rid)}
            while len(self._offline) < _AT_ONCE:
                rid = f"off-{id(self)}-{len(self._counts)}"
                self._counts[rid] = 0
                self._offline.add(rid)
                prompt = [self._rng.randrange(5, engine._vocab_size) for _ in range(_OFFLINE[0])]
                messages.append(engine.request(rid, prompt, _OFFLINE[1], offline=True))
        elif not messages and scheduler.is_fully_idle() and self._pending:
            self._clock.skip_to(self._pending[0].arrival_s)
        return messages

    def noted(self, reqs: list[Any]) -> None:
        """Note the tokens of a batch."""
        now_s = self._clock()
        for req in reqs:
            if (request := self.online.get(req.rid)) is not None:
                new = len(req.output_ids) - len(request.times_s)
                request.times_s += [now_s] * new
            elif req.rid in self._counts and self._pending:
                if self._counts[req.rid] == 0 and req.output_ids:
                    self.offline_tokens += _OFFLINE[0]
                self.offline_tokens += len(req.output_ids) - self._counts[req.rid]
                self._counts[req.rid] = len(req.output_ids)

    def _has_all(self, request: Online) -> bool:
        return len(request.times_s) >= request.tokens

    def _has_ended(self, rid: str) -> bool:
        return rid in self._engine.reqs and self._engine.reqs[rid].finished()


def figures(run: Run, since_s: float, times: Callable[[Online], list[float]]) -> list[float]:
    """Return P50 and P99 of TTFT, then of the gaps, in ms."""
    import numpy as np

    seen = [r for r in run.online.values() if r.arrival_s >= since_s and times(r)]
    ttft = [times(request)[0] - request.arrival_s for request in seen]
    gaps = np.concatenate([np.diff(times(request)) for request in seen])
    return [1e3 * float(np.percentile(v, q)) for v in (ttft, gaps) for q in (50, 99)]


def main() -> None:
    """Run every load, and print a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--rates", default="0.5,1.2,2", help="online requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--mode", default="auto", help="--safepoint-mode")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {args.core})
    clock = Clock()
    time.perf_counter = clock
    from sglang_coserve.core.baseline import Baseline, BaselineToken

    scripted: Any = importlib.import_module("srt.scripted_engine")

    alone: list[BaselineToken] = []
    advance = Baseline.advance

    def noting(self: Baseline, *advance_args: Any) -> list[BaselineToken]:
        tokens = advance(self, *advance_args)
        alone.extend(tokens)
        return tokens

    setattr(Baseline, "advance", noting)  # noqa: B010
    coserve = {
        "online_slowdown": "10%",
        "startup_profile_seconds": 6.0,
        "safepoint_mode": args.mode,
    }
    engine = scripted.ScriptedEngine(
        scripted.EngineSpec(
            args.model,
            server_args=(("chunked_prefill_size", 2048), ("skip_server_warmup", True)),
            coserve=tuple(coserve.items()),
        )
    )
    from sglang_coserve.srt.safepoint.layers import decoder_layers

    scheduler = engine.scheduler
    runs: list[Run] = []
    for layer in decoder_layers(scheduler.tp_worker.model_runner.model):
        layer.forward = _announcing(layer.forward, runs)
    arrivals: dict[str, float] = {}
    scheduler._rank_clock.arrival_s = lambda req, now_s: arrivals.get(req.rid, now_s)
    process = scheduler.process_batch_result
    busy_s = [0.0]
    run_batch = scheduler.run_batch

    def timed(*batch: Any, **options: Any) -> Any:
        start_s = clock()
        result = run_batch(*batch, **options)
        busy_s[0] += clock() - start_s
        return result

    def processed(batch: Any, result: Any) -> None:
        reqs = list(batch.reqs)
        process(batch, result)
        runs[-1].noted(reqs)

    scheduler.process_batch_result = processed
    scheduler.run_batch = timed
    prompts, outputs = TRACES[args.trace]
    for number, rate in enumerate(map(float, args.rates.split(","))):
        found: dict[str, Any] = {"trace": args.trace, "rate": rate}
        for offline in (False, True):
            rng = random.Random(number)
            scheduler.flush_cache()
            at_s = start_s = clock()
            online: list[Online] = []
            while at_s < start_s + args.seconds:
                at_s += rng.expovariate(rate)
                tokens = range(rng.randint(*prompts))
                prompt = [rng.randrange(5, engine._vocab_size) for _ in tokens]
                rid = f"on-{number}-{offline}-{len(online)}"
                online.append(Online(rid, at_s, prompt, rng.randint(*outputs)))
            arrivals.update({request.rid: request.arrival_s for request in online})
            runs.append(Run(engine, clock, online, offline=offline))
            alone.clear()
            busy_s[0] = 0.0
            engine.run(runs[-1].script)
            for rid, _, token_s in alone:
                if rid in runs[-1].online:
                    runs[-1].online[rid].alone_s.append(token_s)
            since_s = start_s + _WARM_UP_S
            name = "coserved" if offline else "alone"
            found["requests"] = len(online)
            found[name] = [round(ms, 1) for ms in figures(runs[-1], since_s, lambda r: r.times_s)]
            known = [round(ms, 1) for ms in figures(runs[-1], since_s, lambda r: r.alone_s)]
            found[f"baseline_{name}"] = known
            if not offline:
                found["load"] = round(busy_s[0] / (clock() - start_s), 2)
        found["offline_tokens_per_s"] = round(runs[-1].offline_tokens / args.seconds, 1)
        found["baseline/alone"] = [
            round(b / a, 2) for a, b in zip(found["alone"], found["baseline_coserved"], strict=True)
        ]
        found["coserved/alone"] = [
            round(b / a, 2) for a, b in zip(found["alone"], found["coserved"], strict=True)
        ]
        print(json.dumps(found), flush=True)


def _announcing(forward: Callable[..., Any], runs: list[Run]) -> Callable[..., Any]:
    def announce_first(*inputs: Any, **options: Any) -> Any:
        if runs:
            runs[-1].announce()
        return forward(*inputs, **options)

    return announce_first


if __name__ == "__main__":
    main()
