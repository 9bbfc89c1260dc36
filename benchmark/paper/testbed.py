"""What the experiments share: workloads, machines, and runs of one policy.

Everything here is simulated: the production scheduler on a roofline of the paper's hardware.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final

from common.arrivals import gamma_arrivals, synthesize
from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets, latency_report
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup
from sglang_coserve.workload.shape import fit_to_context, scale_rate, until
from sglang_coserve.workload.trace import TraceRequest, read_trace, sample_path

Requests = Callable[[], Iterable[SimRequest]]
"""Makes the same requests at each call."""

_Z99: Final = 2.3263
"""The 99th percentile of a standard normal."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths: lognormal, with the mean and the P99 that a paper states."""

    prompt_mean: float
    prompt_p99: float
    output_mean: float
    output_p99: float

    @classmethod
    def of_deviation(
        cls, prompt_mean: float, prompt_std: float, output_mean: float, output_std: float
    ) -> Lengths:
        """Return lognormal lengths by mean and standard deviation."""
        return cls(
            prompt_mean,
            _p99(prompt_mean, prompt_std),
            output_mean,
            _p99(output_mean, output_std),
        )

    def draws(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield endless (prompt, output) pairs, cut at twice the P99."""
        rng = random.Random(seed)
        while True:
            yield (
                _draw(rng, self.prompt_mean, self.prompt_p99),
                _draw(rng, self.output_mean, self.output_p99),
            )


def _p99(mean: float, std: float) -> float:
    sigma = math.sqrt(math.log1p((std / mean) ** 2))
    return mean * math.exp(_Z99 * sigma - sigma**2 / 2)


def _draw(rng: random.Random, mean: float, p99: float) -> int:
    # ln(p99 / mean) = z·σ − σ²/2, the smaller root.
    sigma = _Z99 - math.sqrt(_Z99**2 - 2 * math.log(p99 / mean))
    value = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, round(min(value, 2 * p99)))


def mixed(parts: Sequence[Lengths], seed: int) -> Iterator[tuple[int, int]]:
    """Yield pairs from the parts, each equally often, in random order."""
    rng = random.Random(seed)
    streams = [part.draws(seed + place) for place, part in enumerate(parts, start=1)]
    while True:
        yield next(rng.choice(streams))


def gamma_arriving(
    rate_per_s: float,
    cv: float,
    lengths: Lengths,
    seconds: float,
    seed: int = 1,
    request_class: RequestClass = RequestClass.ONLINE,
) -> Requests:
    """Return requests that come as a Gamma process."""
    endless = synthesize(gamma_arrivals(rate_per_s, cv, seed), lengths.draws(seed))
    return partial(from_trace, list(until(endless, seconds)), request_class)


def azure_online(qps: float, seconds: float) -> Requests:
    """Return online requests sampled from the bundled trace to a mean rate, as HyGen §5.1 does.

    The beginning of the trace is thinned, and compressed first where it has fewer
    requests than that.

    Raises:
        ConfigError: the whole trace has fewer.
    """
    trace, asked = list(read_trace(sample_path("online"))), qps * seconds
    if asked > len(trace):
        raise ConfigError(f"{asked:g} requests: the bundled trace has {len(trace)}")
    whole = (scale_rate(trace, factor) for factor in count(1))
    part = next(p for p in map(list, map(partial(until, end_s=seconds), whole)) if asked <= len(p))
    # Each request by itself (OOCO §5.1.3): a spike of five minutes stays one of five minutes.
    rng = random.Random(1)
    thinned = (request for request in part if rng.random() < asked / len(part))
    kept, _ = fit_to_context(thinned, max_context_tokens=4096)
    return partial(from_trace, kept, RequestClass.ONLINE)


def offline_backlog(
    pairs: Callable[[], Iterator[tuple[int, int]]], max_new_tokens: int | None = None
) -> Requests:
    """Return endless offline requests of these lengths, without common prefixes.

    The scheduler sees ``max_new_tokens`` instead of the length of the output.
    """
    return lambda: from_trace(
        (TraceRequest(index, 0.0, *pair) for index, pair in zip(count(), pairs(), strict=False)),
        RequestClass.OFFLINE,
        max_new_tokens=max_new_tokens,
    )


@dataclass(frozen=True)
class Testbed(SimulationOptions):
    """The paper's machine. ConServe's mechanisms are off unless asked for."""

    checkpoint_gb_s: float = 0.0
    safepoint_layers: int = 0
    noise: float = 0.02
    """Steps on a real device are not all alike."""

    def with_targets(self, targets: SloTargets | None = None) -> SimulationSetup:
        """Return the machine with these targets alone, the same for every policy.

        The target per token limits each gap under every policy, as the papers' algorithms take it.
        The defaults of the policy coserve do not hold.
        """
        setup, targets = self.setup(CoservePolicy.name), targets or SloTargets()
        limits_s = ((Latency.TTFT, targets.ttft_s), (Latency.TBT, targets.tpot_s))
        slos = tuple(
            Slo(latency, Statistic.P99, limit_s=limit_s)
            for latency, limit_s in limits_s
            if limit_s is not None
        )
        scheduler = replace(setup.scheduler, stream_slowdown=None)
        return replace(setup, targets=targets, slos=slos, scheduler=scheduler)


def p99_ttft_ms(result: SimulationResult) -> float:
    """Return the P99 time to first token of the online requests."""
    return (latency_report(result.online).ttft.p99_s or math.nan) * 1e3


def p99_itl_ms(result: SimulationResult) -> float:
    """Return the P99 of the gaps between online tokens, the papers' TBT."""
    return (latency_report(result.online).itl.p99_s or math.nan) * 1e3


def offline_per_s(result: SimulationResult) -> float:
    """Return prompt and output tokens a second of the offline requests."""
    return result.offline_throughput.total_tokens_per_s
