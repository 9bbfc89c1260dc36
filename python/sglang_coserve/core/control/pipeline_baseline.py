"""Pipeline parallelism: the no-interference baseline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

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
        self._engine_of: dict[Hashable, Baseline] = {}

    def __len__(self) -> int:
        return sum(map(len, self._engines))

    def __contains__(self, key: Hashable) -> bool:
        """See ``Baseline``; also False once it has ended."""
        engine = self._engine_of.get(key)
        return engine is not None and key in engine

    def arrived(
        self, key: Hashable, arrival_s: float, prompt_tokens: int, cached_tokens: int = 0
    ) -> None:
        """See ``Baseline.arrived``; the request goes to the engine with the fewest. O(K)."""
        engine = min(self._engines, key=len)
        self._engine_of[key] = engine
        engine.arrived(key, arrival_s, prompt_tokens, cached_tokens)

    def produced(self, key: Hashable, tokens: int = 1) -> None:
        """See ``Baseline.produced``."""
        if (engine := self._engine_of.get(key)) is not None:
            engine.produced(key, tokens)

    def ended(self, key: Hashable) -> None:
        """See ``Baseline.ended``."""
        if (engine := self._engine_of.pop(key, None)) is not None:
            engine.ended(key)

    def drop(self, key: Hashable) -> None:
        """See ``Baseline.drop``."""
        if (engine := self._engine_of.pop(key, None)) is not None:
            engine.drop(key)

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
