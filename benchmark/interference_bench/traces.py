"""Online traffic of recorded traces, and of the lengths and bursts that are published of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from common.arrivals import gamma_arrivals, synthesize
from interference_bench.load import OnlineArrival
from paper.testbed import Lengths
from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.shape import fit_to_context, prompt_token_ids, until
from sglang_coserve.workload.trace import TraceRequest, read_trace

CONTEXT_TOKENS: Final = 32_000
"""Longer requests of a trace are cut: SGLang's table of requests, which has a place for each token
of the context of each request, takes the host's memory. A few places are SGLang's own."""

_PARTS: Final = 7
"""Each seed begins at another seventh of a trace."""


class TraceTraffic(ABC):
    """Traffic whose lengths are known before it has prompts."""

    @abstractmethod
    def requests(self, rate_per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
        """Return the requests in the order of their arrival; the same seed gives the same."""

    def arrivals(
        self, rate_per_s: float, seconds: float, seed: int, vocab_size: int
    ) -> Iterator[OnlineArrival]:
        """See ``Traffic``."""
        for request in self.requests(rate_per_s, seconds, seed):
            prompt = prompt_token_ids(request, vocab_size=vocab_size, seed=seed, first_token_id=10)
            yield OnlineArrival(request.arrival_s, prompt.tolist(), request.output_tokens)


@dataclass(frozen=True)
class RecordedTraffic(TraceTraffic):
    """A piece of a trace, sped up or slowed down to the rate; bursts get shorter with the rest.

    Prompts share prefixes where the trace says so.
    """

    path: Path

    def requests(self, rate_per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
        """See ``TraceTraffic``. As many as the rate says, scaled to fill the time.

        Raises:
            ConfigError: the trace has not so many from where the seed begins.
        """
        whole, _ = _fitting(self.path)
        count = max(1, round(rate_per_s * seconds))
        first = (seed % _PARTS) * len(whole) // _PARTS
        piece = whole[first : first + count + 1]
        if len(piece) <= count:
            raise ConfigError(
                f"{self.path} has {len(whole)} requests, and from number {first} on not {count}: "
                "use fewer"
            )
        begin_s, end_s = piece[0].arrival_s, piece[-1].arrival_s
        scale = seconds / (end_s - begin_s)
        return [
            replace(request, arrival_s=(request.arrival_s - begin_s) * scale)
            for request in piece[:-1]
        ]


@dataclass(frozen=True)
class BurstyTraffic(TraceTraffic):
    """A Gamma process with lognormal lengths."""

    lengths: Lengths
    cv: float
    """Coefficient of variation of the times between arrivals; 1: a Poisson process."""

    def requests(self, rate_per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
        """See ``TraceTraffic``."""
        arrivals_s = gamma_arrivals(rate_per_s, self.cv, seed)
        return list(until(synthesize(arrivals_s, self.lengths.draws(seed)), seconds))


TRACES: Final[Mapping[str, str | BurstyTraffic]] = {
    "azure-conversation": "AzureLLMInferenceTrace_conv.csv",
    "mooncake-conversation": "mooncake_conversation_trace.jsonl",
    # Mean and P99 of AzureLLMInferenceTrace_code.csv (Azure/AzurePublicDataset, 2023).
    "azure-code-like": BurstyTraffic(Lengths(2048, 7436, 28, 251), cv=1.0),
    # ConServe, table 1; twice as bursty as a Poisson process.
    "burstgpt-like": BurstyTraffic(Lengths(2747, 3446, 267, 481), cv=2.0),
}
"""By name: a file in the folder of traces, or what stands for one."""


def traffic_of(name: str, folder: Path) -> TraceTraffic:
    """Return the traffic of this name.

    Raises:
        ConfigError: its file is not there.
    """
    what = TRACES[name]
    if isinstance(what, BurstyTraffic):
        return what
    path = folder / what
    if not path.is_file():
        raise ConfigError(f"{name} needs {path}: see docs/emulation.md for where it comes from")
    return RecordedTraffic(path.resolve())


def fit_of(traffic: TraceTraffic) -> str | None:
    """Return what was cut of a trace to fit the context; None for what is no trace."""
    return _fitting(traffic.path)[1] if isinstance(traffic, RecordedTraffic) else None


@cache
def _fitting(path: Path) -> tuple[list[TraceRequest], str]:
    return fit_to_context(read_trace(path), CONTEXT_TOKENS)
