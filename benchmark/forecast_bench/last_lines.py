"""The end of a batch: how long its last lines run on while most of the engine is idle."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from forecast_bench.batches import ForecastLine
from sglang_coserve.core.policies import make_policy
from sglang_coserve.lines.output_lengths import OutputLengths
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.observer import RequestEvent, StepRecord
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.source import TrafficSource

__all__ = ["KINDS", "Tail", "serve"]

KINDS = ("limits tell", "limits by class", "limits say nothing")
"""How much the limit of a line says of its answer: the half of it to all of it is used; three
limits, of which a third on average is used; the same limit for all lines."""

_MAX_IN_FLIGHT = 512


@dataclass(frozen=True, slots=True)
class Tail:
    """One batch."""

    makespan_s: float
    tail_s: float
    """Of it, from when fewer than half of the requests ran for the last time."""


def serve(kind: str, seed: int, num_lines: int, max_requests: int, *, longest_first: bool) -> Tail:
    """Serve one batch alone; return how it ended."""
    options = SimulationOptions(policy="coserve", max_running=max_requests, seed=seed)
    setup = options.setup("coserve")
    policy = make_policy("coserve")
    setup = replace(setup, queue=replace(policy.queue_config(seed), longest_first=longest_first))
    feed = _Feed(_lines(kind, random.Random(seed), num_lines), seed)
    engine = SimEngine(
        setup.make_scheduler(policy), SimulatedExecutor(setup.executor, setup.model), feed, (feed,)
    )
    while engine.step():
        pass
    half = max_requests / 2
    busy_until_s = max(end_s for end_s, requests in feed.requests if requests >= half)
    return Tail(engine.now_s, engine.now_s - busy_until_s)


class _Feed(TrafficSource):
    """Lines in order, as many in flight as the Batch API sends."""

    def __init__(self, lines: list[ForecastLine], seed: int) -> None:
        super().__init__()
        self.requests: list[tuple[float, int]] = []
        self._unsent = deque(lines)
        self._seed = seed
        self._in_flight: dict[str, ForecastLine] = {}
        self._lengths = OutputLengths()

    def refill(self, _num_waiting: int, _num_running: int, now_s: float) -> Iterator[SimRequest]:
        """See ``TrafficSource``."""
        while self._unsent and len(self._in_flight) < _MAX_IN_FLIGHT:
            line = self._unsent.popleft()
            request = line.request(self._seed)
            request.arrive_at(now_s)
            request.expected_output_tokens = self._lengths.expected(line.limit_tokens)
            self._in_flight[request.info.rid] = line
            yield request

    def on_request(self, _now_s: float, event: RequestEvent, request: SimRequest) -> None:
        """See ``Observer``."""
        if event is RequestEvent.FINISHED:
            line = self._in_flight.pop(request.info.rid)
            self._lengths.add(line.limit_tokens, line.output_tokens)

    def on_step(self, record: StepRecord) -> None:
        """See ``Observer``."""
        self.requests.append((record.end_s, record.offline_running))


def _lines(kind: str, rng: random.Random, count: int) -> list[ForecastLine]:
    lines = []
    for index in range(count):
        prompt_tokens = round(rng.lognormvariate(math.log(300), 0.5))
        if kind == "limits by class":
            limit = rng.choice((128, 128, 128, 512, 512, 2048))
            output = limit * rng.betavariate(2, 4)
        else:
            output = min(2048.0, rng.lognormvariate(math.log(150), 1.0))
            limit = round(output * rng.uniform(1.0, 2.0)) if kind == "limits tell" else 2048
        output_tokens = max(1, min(limit, round(output)))
        lines.append(ForecastLine(index, prompt_tokens, output_tokens, max(1, limit), 0))
    return lines
