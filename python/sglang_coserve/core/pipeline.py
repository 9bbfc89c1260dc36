"""Pipeline parallelism: the duration of a step, and the no-interference baseline.

A pipeline of K stages has K micro-batches in flight, each one stage behind the one before it. All
advance at the pace of the slowest, so a step takes as long as the slowest of the last K would
take alone (HyGen keeps the last K steps for the same reason, appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_coserve.core.control.baseline import Baseline, BaselineToken, EngineSize
from sglang_coserve.core.step_stats import StepStats

__all__ = ["PipelineBaseline", "baseline_of", "pipelined"]


def pipelined(
    predict: Callable[[StepStats], float], batch: StepStats, overlapping: Sequence[StepStats]
) -> tuple[float, bool]:
    """Return the seconds of a step in a pipeline, and whether no overlapping batch is slower.

    Between its start and its tokens K steps begin, including itself. At each start all
    batches advance by one stage, which takes 1/K of the time of the slowest. O(K**2).

    Args:
        predict: Returns the seconds of a batch that passes through all stages alone.
        batch: The batch of the step.
        overlapping: The K - 1 batches before it and the K - 1 after it, in order; empty if K is 1.
    """
    alone_s = predict(batch)
    if not overlapping:
        return alone_s, True
    others_s = [0.0 if other.is_empty else predict(other) for other in overlapping]
    before = len(others_s) // 2
    depth = before + 1
    all_s = [*others_s[:before], alone_s, *others_s[before:]]
    total_s = sum(max(all_s[first : first + depth]) for first in range(depth))
    return total_s / depth, alone_s >= max(others_s)


class PipelineBaseline:
    """The no-interference baseline of a pipeline: one virtual engine for each micro-batch.

    Each has 1/K of the requests and of the KV, and its steps take as long as a batch takes through
    all stages. That the slowest micro-batch delays the others is ignored, so the baseline is a
    little too fast.
    """

    def __init__(self, engines: Sequence[Baseline]) -> None:
        """Start without requests; ``engines`` must have none."""
        self._engines = engines
        self._engine_of: dict[str, Baseline] = {}

    def __len__(self) -> int:
        return sum(map(len, self._engines))

    def arrived(
        self, rid: str, arrival_s: float, prompt_tokens: int, cached_tokens: int = 0
    ) -> None:
        """See ``Baseline.arrived``; the request goes to the engine with the fewest. O(K)."""
        engine = min(self._engines, key=len)
        self._engine_of[rid] = engine
        engine.arrived(rid, arrival_s, prompt_tokens, cached_tokens)

    def produced(self, rid: str, tokens: int = 1) -> None:
        """See ``Baseline.produced``."""
        if (engine := self._engine_of.get(rid)) is not None:
            engine.produced(rid, tokens)

    def ended(self, rid: str) -> None:
        """See ``Baseline.ended``."""
        if (engine := self._engine_of.pop(rid, None)) is not None:
            engine.ended(rid)

    def drop(self, rid: str) -> None:
        """See ``Baseline.drop``."""
        if (engine := self._engine_of.pop(rid, None)) is not None:
            engine.drop(rid)

    def advance(self, predict: Callable[[StepStats], float], now_s: float) -> list[BaselineToken]:
        """See ``Baseline.advance``; tokens are ordered by engine, not by time."""
        return [token for engine in self._engines for token in engine.advance(predict, now_s)]


def baseline_of(size: EngineSize) -> Baseline | PipelineBaseline:
    """Return a baseline of this size without requests, with a pipeline if it has several
    micro-batches."""
    count = size.micro_batches
    engines = [
        Baseline(
            chunk_tokens=size.chunk_tokens,
            max_requests=max(size.max_requests // count, 1),
            kv_tokens=max(size.kv_tokens // count, 1),
            mixes_decodes=size.mixes_decodes,
        )
        for _ in range(count)
    ]
    return engines[0] if count == 1 else PipelineBaseline(engines)
