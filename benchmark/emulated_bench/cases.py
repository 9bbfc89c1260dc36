"""The loads: which online requests come at which rate, and the offline work beside them."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from emulated_bench.figures import full_rate_per_s
from interference_bench.chat import ChatTraffic
from interference_bench.load import Load
from interference_bench.traces import TRACES, TraceTraffic, fit_of, traffic_of
from sglang_coserve.errors import ConfigError
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.workload.trace import TraceRequest

CHAT: Final = "chat"
CHAT_OFFLINE: Final = ((4096, 128), (1024, 1024))
"""Prompt and output tokens of the offline requests beside chats: much to read, much to write."""

TRAFFICS: Final = (*TRACES, CHAT)
_AT_ONCE_S: Final = 1e-3
"""Time in which requests come that shall come at once; their order alone counts."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load. Seeds give it other requests."""

    traffic_name: str
    traffic: TraceTraffic
    share: float
    """Rate as a share of full load."""

    rate_per_s: float
    """Online requests."""

    seconds: float
    """Time in which they come."""

    offline: tuple[int, int]
    """Prompt and output tokens of an offline request."""

    in_flight: int
    """Offline requests."""

    prefixes: int = 0
    """See ``Load.offline_prefixes``."""

    @property
    def name(self) -> str:
        """Name for people."""
        if self.traffic_name == CHAT:
            return f"{CHAT}, offline {self.offline[0]:,} + {self.offline[1]:,}"
        return f"{self.traffic_name}, {self.share:.0%}"

    @property
    def file_name(self) -> str:
        """Name of the file with the figures."""
        if self.traffic_name == CHAT:
            return f"{CHAT}-offline-{self.offline[0]}x{self.offline[1]}.json"
        return f"{self.traffic_name}-load-{round(100 * self.share)}.json"

    @property
    def head(self) -> dict[str, Any]:
        """Fields of the file that describe the load."""
        return {
            "traffic": self.traffic_name,
            "name": self.name,
            "load": self.share,
            "rate_per_s": self.rate_per_s,
            "seconds": self.seconds,
            "offline": self.offline,
            "cut_to_context": fit_of(self.traffic),
        }

    def load(self, seed: int) -> Load:
        """Return what an engine is offered."""
        alone = Load(self.traffic, self.rate_per_s, self.seconds, seed)
        return alone.with_offline(self.offline, self.in_flight, self.prefixes)

    def requests(self, seed: int) -> list[TraceRequest]:
        """Return the online requests in the order of their arrival."""
        return self.traffic.requests(self.rate_per_s, self.seconds, seed)


def cases_of(options: Namespace, emulation: Emulation) -> Iterator[Case]:
    """Yield the loads of a command line. Traffic without its trace is reported and left out."""
    for name in options.traffic:
        try:
            traffic = ChatTraffic() if name == CHAT else traffic_of(name, options.traces)
            at_once_s = _AT_ONCE_S
            if isinstance(traffic, ChatTraffic):  # Its chats at a time would grow with the rate.
                at_once_s = options.at_once / traffic.rate_per_s(options.chats)
            at_once = traffic.requests(options.at_once / at_once_s, at_once_s, 0)
        except ConfigError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        full_per_s = full_rate_per_s(emulation, at_once)
        offline: Sequence[tuple[int, int]] = [tuple(options.offline)]
        rates_per_s = [share * full_per_s for share in options.load]
        if isinstance(traffic, ChatTraffic):
            offline, rates_per_s = CHAT_OFFLINE, [traffic.rate_per_s(options.chats)]
        for rate_per_s, lengths in product(rates_per_s, offline):
            yield Case(
                name,
                traffic,
                rate_per_s / full_per_s,
                rate_per_s,
                max(options.seconds, options.requests / rate_per_s),
                lengths,
                options.in_flight,
                getattr(options, "prefixes", 0),  # The simulator has none.
            )
