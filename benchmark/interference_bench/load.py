"""Online requests that arrive by chance, offline requests that never end, and their flags."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class OnlineArrival:
    """One of them."""

    at_s: float
    """After the beginning."""

    prompt: Sequence[int]
    output_tokens: int


class Traffic(Protocol):
    """What online requests are like."""

    def arrivals(
        self, rate_per_s: float, seconds: float, seed: int, vocab_size: int
    ) -> Iterator[OnlineArrival]:
        """Yield requests in the order of their arrival; the same seed gives the same."""
        ...


@dataclass(frozen=True, slots=True)
class OnlineTraffic:
    """A Poisson process; lengths are drawn evenly from the bounds."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def arrivals(
        self, rate_per_s: float, seconds: float, seed: int, vocab_size: int
    ) -> Iterator[OnlineArrival]:
        """See ``Traffic``."""
        rng, at_s = random.Random(seed), 0.0
        while (at_s := at_s + rng.expovariate(rate_per_s)) < seconds:
            prompt = _tokens(rng, rng.randint(*self.prompt_tokens), vocab_size)
            yield OnlineArrival(at_s, prompt, rng.randint(*self.output_tokens))


TRAFFIC: Final[Mapping[str, OnlineTraffic]] = {
    "prompts": OnlineTraffic((32, 256), (1, 4)),
    "outputs": OnlineTraffic((32, 256), (8, 48)),
}


@dataclass(frozen=True, slots=True)
class Load:
    """What one run offers to an engine; the same seed gives the same requests."""

    traffic: Traffic
    rate_per_s: float
    """Online requests."""

    seconds: float
    seed: int
    offline_prompt_tokens: int = 0
    """0: no offline requests."""

    offline_output_tokens: int = 0
    offline_in_flight: int = 0
    offline_prefixes: int = 0
    """Each offline prompt begins with one of so many; 0: all is its own."""

    offline_shared: float = 0.5
    """Such a prefix ÷ its prompt."""

    def beside(self, options: argparse.Namespace) -> Load:
        """Return the same with the offline requests of ``load_parser``."""
        return self.with_offline(options.offline, options.in_flight, options.prefixes)

    def with_offline(self, offline: Sequence[int], in_flight: int, prefixes: int = 0) -> Load:
        """Return the same with offline requests.

        Args:
            offline: Tokens of a prompt and of an output.
            in_flight: Requests at a time.
            prefixes: See ``offline_prefixes``.
        """
        prompt_tokens, output_tokens = offline
        return replace(
            self,
            offline_prompt_tokens=prompt_tokens,
            offline_output_tokens=output_tokens,
            offline_in_flight=in_flight,
            offline_prefixes=prefixes,
        )

    def alone(self) -> Load:
        """Return the same without offline requests."""
        return Load(self.traffic, self.rate_per_s, self.seconds, self.seed)

    def online(self, vocab_size: int) -> list[OnlineArrival]:
        """Return the online requests in the order of their arrival."""
        return list(self.traffic.arrivals(self.rate_per_s, self.seconds, self.seed, vocab_size))

    def offline_prompts(self, vocab_size: int) -> Iterator[list[int]]:
        """Yield prompts without end; nothing if there are none."""
        rng = random.Random(self.seed + 1_000_003)
        tokens = self.offline_prompt_tokens
        shared = int(self.offline_shared * tokens)
        prefixes = [_tokens(rng, shared, vocab_size) for _ in range(self.offline_prefixes)]
        while tokens:
            prefix = rng.choice(prefixes) if prefixes else []
            yield prefix + _tokens(rng, tokens - len(prefix), vocab_size)


def load_parser(description: str, traffic: Iterable[str]) -> argparse.ArgumentParser:
    """Return a command line with what all systems are given; ``traffic`` are the kinds there are.

    The program sets defaults for options that have none here.
    """
    parser = argparse.ArgumentParser(
        description=description.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--traffic", nargs="+", choices=list(traffic), help="what comes online")
    add("--load", nargs="+", type=float, default=[0.2, 0.5, 0.8], help="shares of full load")
    add("--repeats", type=int, help="other requests each time, on the same engine")
    add("--seconds", type=float, help="of a run, on the virtual clock")
    add("--offline", nargs=2, type=int, metavar="TOKENS", help="prompt and output tokens")
    add("--in-flight", type=int, help="offline requests")
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add what only real engines are given."""
    add = parser.add_argument
    add("--prefixes", type=int, default=0, help="that halves of offline prompts share; 0: none")
    add("--host-factor", type=float, help="how long a second of CPU time is")
    add("--core", type=int, default=0, help="all engines run on this one")


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(10, vocab_size), k=count)
