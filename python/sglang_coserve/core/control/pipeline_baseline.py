"""Pipeline parallelism: the no-interference baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_coserve.core.control.baseline import Baseline, BaselineToken, EngineSize
from sglang_coserve.core.step_stats import StepStats

__all__ = ["PipelineBaseline", "baseline_of"]


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
