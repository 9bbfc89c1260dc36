"""Batches of lines whose true lengths the forecast does not know."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.core.request import RequestClass
from sglang_coserve.lines.fair_slots import JobShare
from sglang_coserve.lines.output_lengths import OutputLengths
from sglang_coserve.lines.progress import Progress, Usage
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.workload import TraceRequest

__all__ = ["ForecastLine", "SimBatch", "random_batches"]

_OWNERS = ("a", "b", "c")
_LIMITS = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class ForecastLine:
    """One line, as it is and as it looks."""

    index: int
    prompt_tokens: int
    output_tokens: int
    limit_tokens: int
    estimated_tokens: int

    def request(self, seed: int) -> SimRequest:
        """Return it as an offline request of the simulator."""
        trace = TraceRequest(self.index, 0.0, self.prompt_tokens, self.output_tokens)
        (request,) = from_trace(
            [trace], RequestClass.OFFLINE, seed=seed, max_new_tokens=self.limit_tokens
        )
        return request


@dataclass
class SimBatch:
    """A batch, and how far it is."""

    number: int
    owner: str
    arrival_s: float
    lines: Sequence[ForecastLine]
    share: JobShare = field(init=False)
    unsent: deque[ForecastLine] = field(init=False)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    completed: int = 0
    took_tokens: int = 0
    estimated_done_tokens: int = 0

    def __post_init__(self) -> None:
        self.share = JobShare(self.owner, 0, 1.0, math.inf)
        self.unsent = deque(self.lines)

    @property
    def estimated_tokens(self) -> int:
        """What its lines look like."""
        return sum(line.estimated_tokens for line in self.lines)

    @property
    def is_complete(self) -> bool:
        """True when every line has ended."""
        return self.completed == len(self.lines)

    def record(self) -> JobRecord:
        """Return it as the store would keep it."""
        usage = Usage(input_tokens=self.took_tokens)
        return JobRecord(
            id=str(self.number),
            owner=self.owner,
            endpoint="/v1/completions",
            input_file_id="",
            output_file_id="",
            error_file_id="",
            completion_window="24h",
            metadata=None,
            output_expires_after_s=None,
            priority=0,
            weight=1.0,
            idempotency_key=None,
            fingerprint="",
            status=Status.IN_PROGRESS,
            created_at_s=self.arrival_s,
            expires_at_s=self.arrival_s + 86_400.0,
            total_lines=len(self.lines),
            estimated_tokens=self.estimated_tokens,
            progress=Progress(
                self.completed, usage=usage, estimated_tokens=self.estimated_done_tokens
            ),
        )


def random_batches(seed: int, mean_gap_s: float, until_s: float) -> Iterator[SimBatch]:
    """Yield batches of 50 to 1,000 lines, at random times, of three owners.

    The lines of a batch are of one kind: prompts of a like length, one limit, answers that
    take about the same part of it; the kinds differ much.
    """
    rng = random.Random(seed)
    now_s, index, number = 0.0, 0, 0
    while (now_s := now_s + rng.expovariate(1 / mean_gap_s)) < until_s:
        limit = rng.choice(_LIMITS)
        prompt = rng.lognormvariate(math.log(400), 0.7)
        share = rng.betavariate(2, 2)
        # Four bytes are more or less than a token, the same for all lines of a kind.
        tokenizer = rng.lognormvariate(0.0, 0.2)
        lines = []
        for _ in range(round(math.exp(rng.uniform(math.log(50), math.log(1000))))):
            prompt_tokens = max(1, min(8000, round(prompt * rng.lognormvariate(0.0, 0.3))))
            output = share * limit * rng.lognormvariate(0.0, 0.5)
            lines.append(
                ForecastLine(
                    index,
                    prompt_tokens,
                    max(1, min(limit, round(output))),
                    limit,
                    round(prompt_tokens * tokenizer) + limit,
                )
            )
            index += 1
        yield SimBatch(number, rng.choice(_OWNERS), now_s, lines)
        number += 1
