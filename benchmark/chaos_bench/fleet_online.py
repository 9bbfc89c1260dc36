"""Online requests to a fleet's router, from a thread, whose answers are known."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from chaos_bench.answers import KnownAnswer
from chaos_bench.figures import Figure
from chaos_bench.observation import ChaosError, Interval
from chaos_bench.online_stream import OnlineAnswer, OnlineRequest, online_requests

__all__ = ["OnlineCounts", "OnlineLoad"]

_END_TIMEOUT_S: Final = 240.0
"""More than a request may take."""

_BREAK_S: Final = 1.0
"""Within it a router has passed on that a stream broke."""


@dataclass(frozen=True, slots=True)
class OnlineCounts:
    """What became of all online requests."""

    answers: list[OnlineAnswer]
    killed: list[OnlineAnswer]
    """Failed, and under way when an engine was killed."""

    failed: list[OnlineAnswer]
    """Failed otherwise."""

    different: list[OnlineAnswer]
    """Answered with another text than undisturbed."""

    def figures(self) -> list[Figure]:
        """Return the counts, and TTFT at the client."""
        figures = [
            Figure("online requests", len(self.answers)),
            Figure("that failed with a killed engine", len(self.killed)),
            Figure("that failed otherwise", len(self.failed), at_most=0),
            Figure("online answers different", len(self.different), at_most=0),
        ]
        ttfts_s = [a.first_token_s - a.start_s for a in self.answers if a.first_token_s is not None]
        if ttfts_s:
            for percent in (50, 99):
                ttft_s = float(np.percentile(ttfts_s, percent))
                figures.append(Figure(f"P{percent} online TTFT", ttft_s, "s"))
        return figures

    def examples(self) -> list[str]:
        """Return what went wrong."""
        failed = [f"online request after {_span_s(a):.1f} s: {a.failure}" for a in self.failed]
        return [*failed, *(f"online answer {a.text[:200]!r}" for a in self.different)]


class OnlineLoad:
    """Sends ``per_s`` requests a second on average from ``start`` to ``stop``."""

    def __init__(
        self, base_url: str, known: Sequence[KnownAnswer], per_s: float, seed: int
    ) -> None:
        self._base_url = base_url
        self._known = known
        self._per_s = per_s
        self._seed = seed
        self._is_over = threading.Event()
        self._answers: list[OnlineAnswer] | None = None
        self._thread = threading.Thread(target=self._send, name="online requests", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self, kills: Sequence[Interval]) -> OnlineCounts:
        """Send no more, wait for all answers and judge them; engines were killed in ``kills``.

        Raises:
            ChaosError: answers do not come, or sending failed.
        """
        self._is_over.set()
        self._thread.join(_END_TIMEOUT_S)
        if self._answers is None:
            raise ChaosError("online requests do not end, or could not be sent")
        failed = [answer for answer in self._answers if answer.failure is not None]
        killed = [answer for answer in failed if _was_killed(answer, kills)]
        texts = {(known.prompt, known.max_tokens): known.text for known in self._known}
        return OnlineCounts(
            answers=self._answers,
            killed=killed,
            failed=[answer for answer in failed if answer not in killed],
            different=[
                answer
                for answer in self._answers
                if answer.failure is None
                and answer.text != texts[answer.request.prompt, answer.request.max_tokens]
            ],
        )

    def _send(self) -> None:
        sending = online_requests(
            self._base_url,
            self._requests(),
            per_s=self._per_s,
            seed=self._seed,
            is_over=self._is_over.is_set,
        )
        self._answers = asyncio.run(sending)

    def _requests(self) -> Iterator[OnlineRequest]:
        rng = random.Random(self._seed)
        while True:
            answer = rng.choice(self._known)
            yield OnlineRequest(answer.prompt, answer.max_tokens)


def _span_s(answer: OnlineAnswer) -> float:
    return answer.end_s - answer.start_s


def _was_killed(answer: OnlineAnswer, kills: Sequence[Interval]) -> bool:
    """Tell whether it broke off as an engine was killed; nobody says which engine had it."""
    return any(
        answer.start_s <= kill.end_s and kill.start_s <= answer.end_s <= kill.end_s + _BREAK_S
        for kill in kills
    )
