"""How long requests of both classes waited for their tokens, gathered for Prometheus.

Here a value costs a place in a list; ``exporter`` hands the sums over once a second. To observe
each token by itself would cost more than a thousandth of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from sglang_coserve.core.control.bill import Delay
from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.steps.engine_requests import EngineRequests
from sglang_coserve.srt.steps.step_record import StepRecord, StepRequest

WAIT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0),
)
"""Of TTFT and of the time until a request first runs: those of OpenTelemetry's
``gen_ai.server.time_to_first_token``, and longer ones for offline requests."""

GAP_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 10.0, 60.0),
)
"""Of gaps: those of ``gen_ai.server.time_per_output_token``, finer below 10 ms and coarser above a
second."""

DELAY_BUCKETS_S: Final = (0.0, *GAP_BUCKETS_S)
"""What is at most 0 was not delayed."""


class Buckets:
    """A histogram that is emptied now and then."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        """By the least bound that is not exceeded; the last of more than all."""

        self.sum_s = 0.0

    def add(self, value_s: float, count: int = 1) -> None:
        """Take a value in, so many times. O(log bounds)."""
        self.counts[bisect_left(self.bounds_s, value_s)] += count
        self.sum_s += count * value_s

    def take(self) -> tuple[list[int], float]:
        """Return counts and sum, and begin anew."""
        taken = self.counts, self.sum_s
        self.counts, self.sum_s = [0] * len(self.counts), 0.0
        return taken


class LatencyHistograms:
    """Latencies, prompt tokens and cached tokens of requests by class, from records of steps."""

    def __init__(self) -> None:
        classes = ("online", "offline")
        self.ttft = {name: Buckets(WAIT_BUCKETS_S) for name in classes}
        self.queued = {name: Buckets(WAIT_BUCKETS_S) for name in classes}
        self.gaps = {name: Buckets(GAP_BUCKETS_S) for name in classes}
        self.delays = {token: Buckets(DELAY_BUCKETS_S) for token in ("first", "last")}
        self.prompt_tokens = dict.fromkeys(classes, 0)
        self.cached_tokens = dict.fromkeys(classes, 0)

    def ended(self, record: StepRecord) -> None:
        """Record the requests that began in a step, and their tokens. O(requests)."""
        for request in record.prompts:
            if request.reception is not None:
                self._begun(request, record.launched_s)
        for request in record.first:
            waited_s = record.ended_s - request.info.arrival_s
            self.ttft[request.info.request_class.value].add(max(0.0, waited_s))
        # Most requests of a step had their last tokens in the same step.
        for name, requests in (("online", record.online), ("offline", record.offline)):
            lasts = Counter([last_s for _, token_s, last_s, *_ in requests if token_s is not None])
            for last_s, count in lasts.items():
                if last_s is not None:
                    self.gaps[name].add(record.ended_s - last_s, count)

    def _begun(self, request: StepRequest, now_s: float) -> None:
        info = request.info
        name = info.request_class.value
        self.queued[name].add(max(0.0, now_s - info.arrival_s))
        self.prompt_tokens[name] += info.prompt_tokens
        self.cached_tokens[name] += min(request.context_tokens, info.prompt_tokens)

    def billed(self, delays: Iterable[Delay]) -> None:
        """Take in what was billed; early tokens are not delayed."""
        for delay in delays:
            self.delays["first"].add(max(0.0, delay.ttft_s))
            self.delays["last"].add(max(0.0, delay.total_s))


def oldest_waiting_s(requests: EngineRequests, now_s: float) -> dict[str, float]:
    """Return how long the request has waited that came first, of those of a class that have never
    run; 0 where there is none. O(begun requests)."""
    waited_s = {}
    for request_class in RequestClass:
        infos = (live.info for live in requests.of_class(request_class))
        first = next((info for info in infos if not requests.has_begun(info.rid)), None)
        waited_s[request_class.value] = 0.0 if first is None else max(0.0, now_s - first.arrival_s)
    return waited_s
