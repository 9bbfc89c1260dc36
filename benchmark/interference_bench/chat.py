"""Online traffic of chats: each turn's prompt contains the turns before it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from interference_bench.traces import CONTEXT_TOKENS, TraceTraffic
from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest

CHATS: Final = 40
"""Usual number of chats at a time."""


@dataclass(frozen=True)
class ChatTraffic(TraceTraffic):
    """Chats with histories, so many at a time that their turns come at the rate asked for.

    A turn's prompt is the chat's previous prompt and new tokens. Outputs are not part of the next
    prompt, because outputs of an emulated model are arbitrary: the new tokens stand for the last
    answer and the next question. A chat ends where its next turn exceeds the context, and another
    one with a history of its own takes its place.
    """

    turn_s: float = 45.0
    """Mean time between the turns of a chat."""

    spread: float = 0.2
    """Largest deviation of the time between two turns from the mean, as a share."""

    history_tokens: int = 6144
    """Prompt tokens of a chat before its first turn."""

    turn_tokens: int = 512
    """New prompt tokens of a turn."""

    output_tokens: int = 100
    context_tokens: int = CONTEXT_TOKENS

    def __post_init__(self) -> None:
        """Refuse chats that have no turn."""
        first_tokens = self.history_tokens + self.turn_tokens + self.output_tokens
        if self.turn_tokens < 1 or first_tokens > self.context_tokens:
            raise ConfigError(
                f"a chat's first turn has {first_tokens} tokens with its output, of these "
                f"{self.turn_tokens} new: use at least one new token, and at most the context of "
                f"{self.context_tokens} tokens"
            )

    def rate_per_s(self, chats: int = CHATS) -> float:
        """Return the turns a second of so many chats at a time."""
        return chats / self.turn_s

    def requests(self, rate_per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
        """See ``TraceTraffic``. The rate is rounded to whole chats, at least one."""
        places = max(1, round(rate_per_s * self.turn_s))
        rng = random.Random(seed)
        turns = [
            turn
            for place in range(places)
            for turn in self._turns(random.Random(rng.random()), seconds, place, places)
        ]
        turns.sort(key=lambda turn: turn.arrival_s)
        return [replace(turn, index=index) for index, turn in enumerate(turns)]

    def _turns(
        self, rng: random.Random, seconds: float, place: int, places: int
    ) -> Iterator[TraceRequest]:
        """Yield the turns of the chats that follow each other at one of the places."""
        blocks_per_chat = math.ceil(self.context_tokens / BLOCK_TOKENS)
        at_s = rng.uniform(0, self.turn_s)
        chat, tokens = place, self.history_tokens
        while at_s < seconds:
            tokens += self.turn_tokens
            if tokens + self.output_tokens > self.context_tokens:
                chat, tokens = chat + places, self.history_tokens + self.turn_tokens
            first = chat * blocks_per_chat
            hash_ids = tuple(range(first, first + math.ceil(tokens / BLOCK_TOKENS)))
            yield TraceRequest(0, at_s, tokens, self.output_tokens, hash_ids)
            at_s += self.turn_s * rng.uniform(1 - self.spread, 1 + self.spread)
