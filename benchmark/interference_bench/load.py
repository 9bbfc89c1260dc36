"""Online requests that arrive by chance, and offline requests that never end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["FLOOD", "MODEST", "TRAFFIC", "Load", "OnlineArrival", "OnlineTraffic"]

MODEST: Final = "modest"
FLOOD: Final = "flood"
"""The tenants, where there are two."""


@dataclass(frozen=True, slots=True)
class OnlineTraffic:
    """What online requests are like; lengths are drawn evenly from the bounds."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


TRAFFIC: Final[Mapping[str, OnlineTraffic]] = {
    "prompts": OnlineTraffic((32, 256), (1, 4)),
    "outputs": OnlineTraffic((32, 256), (8, 48)),
    "chat": OnlineTraffic((512, 2048), (64, 256)),
}
"""The last one is for a GPU, such as an emulated one."""


@dataclass(frozen=True, slots=True)
class OnlineArrival:
    """One of them."""

    at_s: float
    """After the beginning."""

    prompt: Sequence[int]
    output_tokens: int
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What one run offers to an engine; the same seed gives the same requests."""

    traffic: OnlineTraffic
    rate_per_s: float
    """Online requests, as a Poisson process."""

    seconds: float
    seed: int
    offline_prompt_tokens: int = 0
    """0: no offline requests."""

    offline_output_tokens: int = 0
    offline_in_flight: int = 0
    flood_per_s: float = 0.0
    """Online requests besides, of another tenant."""

    def online(self, vocab_size: int) -> list[OnlineArrival]:
        """Return the online requests in the order of their arrival."""
        if not self.flood_per_s:
            return self._of_one(self.rate_per_s, self.seed, vocab_size)
        modest = self._of_one(self.rate_per_s, self.seed, vocab_size, MODEST)
        flood = self._of_one(self.flood_per_s, self.seed + 2_000_003, vocab_size, FLOOD)
        return sorted([*modest, *flood], key=lambda request: request.at_s)

    def _of_one(
        self, rate_per_s: float, seed: int, vocab_size: int, tenant: str | None = None
    ) -> list[OnlineArrival]:
        rng = random.Random(seed)
        requests, at_s = [], 0.0
        while (at_s := at_s + rng.expovariate(rate_per_s)) < self.seconds:
            prompt = _tokens(rng, rng.randint(*self.traffic.prompt_tokens), vocab_size)
            output_tokens = rng.randint(*self.traffic.output_tokens)
            requests.append(OnlineArrival(at_s, prompt, output_tokens, tenant))
        return requests

    def offline_prompts(self, vocab_size: int) -> Iterator[list[int]]:
        """Yield prompts without end; nothing if there are none."""
        rng = random.Random(self.seed + 1_000_003)
        while self.offline_prompt_tokens:
            yield _tokens(rng, self.offline_prompt_tokens, vocab_size)


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(10, vocab_size), k=count)
