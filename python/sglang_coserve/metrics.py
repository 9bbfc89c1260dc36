"""What is measured, and exactly how: pure definitions over request timelines.

Symbols, for request r: arrival ``a``, output token times ``t_1 ≤ … ≤ t_n``,
prompt tokens ``p`` of which ``h`` came from the prefix cache. ``docs/metrics.md``
states the same definitions with the reasons for them. Functions know nothing
of request classes: pass the timelines of one class, or of all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np


class Outcome(Enum):
    """How a request stood when the measurement ended."""

    FINISHED = "finished"
    """Delivered everything it was asked for."""

    UNFINISHED = "unfinished"
    """Still waiting or running; what it delivered so far is real work."""

    FAILED = "failed"
    """Refused, shed, aborted or broken off; what it delivered is lost."""


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """When one request arrived and when each of its output tokens was delivered.

    All times share one clock. Tokens delivered together have equal times, so
    ``len(token_times_s)`` is always the number of output tokens.
    """

    rid: str
    arrival_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache instead of being computed."""

    outcome: Outcome = Outcome.FINISHED

    def __post_init__(self) -> None:
        assert 0 <= self.cached_prompt_tokens <= self.prompt_tokens, f"{self.rid}: cached tokens"
        times = (self.arrival_s, *self.token_times_s)
        assert all(a <= b for a, b in pairwise(times)), f"{self.rid}: times not in order"

    @property
    def output_tokens(self) -> int:
        """Output tokens delivered: n."""
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: t_1 − a. None before the first token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (t_n − t_1) / (n − 1). None for n < 2."""
        if self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Inter-token latencies, the papers' TBT: times between two deliveries of tokens.

        Tokens that were delivered together have no gap between them, so the values are at most
        n − 1, and none is 0.
        """
        pairs = pairwise(self.token_times_s)
        return tuple(later - earlier for earlier, later in pairs if later > earlier)

    @property
    def e2e_s(self) -> float | None:
        """End-to-end latency: t_n − a. None unless finished with at least one token."""
        if self.outcome is not Outcome.FINISHED or not self.token_times_s:
            return None
        return self.token_times_s[-1] - self.arrival_s

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end latency per output token: (t_n − a) / n (BROS §VII-A)."""
        return None if self.e2e_s is None else self.e2e_s / self.output_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """The distribution of one latency. With ``n == 0`` every other field is None."""

    n: int
    mean_s: float | None = None
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None

    def to_dict(self) -> dict[str, float | int | None]:
        """Return ``{n, mean, p50, p90, p99, max}`` with the latencies in milliseconds."""
        names = ("mean", "p50", "p90", "p99", "max")
        return {"n": self.n, **{name: milliseconds(getattr(self, f"{name}_s")) for name in names}}


def summarize(values_s: Iterable[float | None]) -> Summary:
    """Summarize latencies in seconds; None (undefined for a request) is left out.

    Of m values the q-th percentile is that at position (m − 1)·q/100, interpolated linearly
    between order statistics x_0 ≤ … ≤ x_(m−1): NumPy's default.
    """
    defined = np.array([value for value in values_s if value is not None], dtype=np.float64)
    if defined.size == 0:
        return Summary(n=0)
    p50, p90, p99, largest = np.percentile(defined, [50, 90, 99, 100])
    return Summary(
        defined.size, float(defined.mean()), float(p50), float(p90), float(p99), float(largest)
    )


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Every latency of one group of requests."""

    n: int
    """Requests in the group."""

    finished: int
    """Of these, requests that finished."""

    ttft: Summary
    tpot: Summary
    itl: Summary
    """One value per gap between deliveries of tokens, not one per request."""

    e2e: Summary
    normalized: Summary
    """Seconds per output token; its mean is the normalized latency of BROS."""

    def to_dict(self) -> dict[str, object]:
        """Return ``{n, finished, ttft_ms: {…}, tpot_ms: {…}, …}``, ready for JSON."""
        summaries = {
            f"{name}_ms": getattr(self, name).to_dict()
            for name in ("ttft", "tpot", "itl", "e2e", "normalized")
        }
        return {"n": self.n, "finished": self.finished, **summaries}


def latency_report(timelines: Sequence[RequestTimeline]) -> LatencyReport:
    """Summarize every latency. O(tokens log tokens).

    TTFT, TPOT and ITL take in every token delivered, whatever became of the
    request: leaving failed requests out would flatter a system that sheds load.
    """
    return LatencyReport(
        n=len(timelines),
        finished=sum(t.outcome is Outcome.FINISHED for t in timelines),
        ttft=summarize(t.ttft_s for t in timelines),
        tpot=summarize(t.tpot_s for t in timelines),
        itl=summarize(gap for t in timelines for gap in t.itls_s),
        e2e=summarize(t.e2e_s for t in timelines),
        normalized=summarize(t.normalized_latency_s for t in timelines),
    )


@dataclass(frozen=True, slots=True)
class SloTargets:
    """What one request is promised, in seconds. None promises nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, tpot_ms: float | None) -> SloTargets:
        """Return targets that are given in milliseconds, as flags have them."""
        return cls(*(None if ms is None else ms / 1e3 for ms in (ttft_ms, tpot_ms)))

    def in_ms(self) -> tuple[float | None, float | None]:
        """Return the targets of TTFT and TPOT in milliseconds."""
        return milliseconds(self.ttft_s), milliseconds(self.tpot_s)

    def met_by(self, timeline: RequestTimeline) -> bool:
        """True when the request finished, its TTFT and its TPOT within target.

        A single output token has no TPOT, so no TPOT target can be missed.
        """
        is_finished = timeline.outcome is Outcome.FINISHED
        return is_finished and self.kept_by(timeline.ttft_s, timeline.tpot_s)

    def kept_by(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Return whether both latencies are within target; None where undefined."""
        if self.ttft_s is not None and (ttft_s is None or ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


def attainment(timelines: Sequence[RequestTimeline], targets: SloTargets) -> float | None:
    """Return the fraction of requests that met their targets; None without requests.

    Every request counts in the denominator: one that failed or did not finish
    has missed.
    """
    if not timelines:
        return None
    return sum(map(targets.met_by, timelines)) / len(timelines)


def token_attainment(timelines: Iterable[RequestTimeline], targets: SloTargets) -> float | None:
    """Return the fraction of tokens on time; None without such tokens.

    A first token is on time within the TTFT target, a later one within the TPOT
    target after the token before it, as constraint 6 of BROS §IV-A times them.
    Tokens without a target are not counted. A request that did not finish adds
    one late token, the one it still owes.
    """
    on_time = total = 0
    for timeline in timelines:
        waits = [b - a for a, b in pairwise((timeline.arrival_s, *timeline.token_times_s))]
        if timeline.outcome is not Outcome.FINISHED:
            waits.append(math.inf)
        for target_s, part in ((targets.ttft_s, waits[:1]), (targets.tpot_s, waits[1:])):
            if target_s is not None:
                on_time += sum(wait <= target_s for wait in part)
                total += len(part)
    return on_time / total if total else None


def goodput_per_s(
    timelines: Iterable[RequestTimeline], targets: SloTargets, start_s: float, end_s: float
) -> float:
    """Return requests per second that met their targets and ended in (start, end]."""
    assert start_s < end_s, f"empty interval ({start_s}, {end_s}]"
    good = sum(_ended_within(t, start_s, end_s) and targets.met_by(t) for t in timelines)
    return good / (end_s - start_s)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over one interval. See ``throughput`` for what each counts."""

    requests_per_s: float
    output_tokens_per_s: float
    computed_tokens_per_s: float
    total_tokens_per_s: float


def throughput(timelines: Iterable[RequestTimeline], start_s: float, end_s: float) -> Throughput:
    """Return what was delivered in (start, end], per second.

    - requests: finished ones whose last token falls in the interval;
    - output: output tokens in the interval;
    - computed: output plus p − h of each prompt whose first token falls in it;
    - total: output plus p of the same prompts, the papers' offline tokens/s
      ("prefill and decode tokens", ConServe §6.1).

    Tokens of unfinished requests count, those of failed requests do not. A
    token computed again after a retraction counts once: work wasted is no
    throughput. The interval excludes its start, as what is delivered at that
    instant was computed before it.
    """
    assert start_s < end_s, f"empty interval ({start_s}, {end_s}]"
    requests = output = prompt = cached = 0
    for timeline in timelines:
        if timeline.outcome is Outcome.FAILED:
            continue
        times = timeline.token_times_s
        requests += _ended_within(timeline, start_s, end_s)
        output += bisect_right(times, end_s) - bisect_right(times, start_s)
        if times and start_s < times[0] <= end_s:
            prompt += timeline.prompt_tokens
            cached += timeline.cached_prompt_tokens
    duration_s = end_s - start_s
    return Throughput(
        requests_per_s=requests / duration_s,
        output_tokens_per_s=output / duration_s,
        computed_tokens_per_s=(output + prompt - cached) / duration_s,
        total_tokens_per_s=(output + prompt) / duration_s,
    )


def _ended_within(timeline: RequestTimeline, start_s: float, end_s: float) -> bool:
    if timeline.outcome is not Outcome.FINISHED or not timeline.token_times_s:
        return False
    return start_s < timeline.token_times_s[-1] <= end_s


def milliseconds(seconds: float | None) -> float | None:
    """Return seconds in milliseconds, None for None."""
    return None if seconds is None else seconds * 1000
