"""Aborts forward passes at random layers, in a process with a ``ScriptedEngine``."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from sglang_coserve.core.preemption_guard import GuardConfig, PreemptionGuard
from srt.scripted_engine import ScriptedEngine

UNLIMITED = GuardConfig(max_aborts_in_a_row=10**6, wasted_share=1.0, burst_s=1e9)


class RandomAborts:
    """Raises the flag in the middle of passes, as the monitor thread would."""

    def __init__(self, engine: ScriptedEngine) -> None:
        """Stand before every layer of the engine's model."""
        from sglang_coserve.srt.safepoint.layers import decoder_layers

        self._safepoints = engine.scheduler.parts.runner.safepoints
        assert self._safepoints is not None
        self._safepoints.guard = PreemptionGuard(UNLIMITED)
        self._rng = random.Random(0)
        self._probability = 0.0
        self._target: int | None = None
        layers = decoder_layers(engine.scheduler.tp_worker.model_runner.model)
        self._num_layers = len(layers)
        self.layers: Counter[int] = Counter()
        for number, layer in enumerate(layers):
            self._stand_before(number, layer)

    def start(self, seed: int, probability: float) -> None:
        """Abort this part of the batches that may be aborted from now on."""
        self._rng.seed(seed)
        self._probability = probability

    def stop(self) -> None:
        """Abort no more."""
        self._probability = 0.0

    def counts(self) -> dict[str, int]:
        """Aborts so far, by kind of batch."""
        return {kind.value: n for kind, n in self._safepoints.stats.aborts.items()}

    def _stand_before(self, number: int, layer: Any) -> None:
        forward = layer.forward

        def abort_or_forward(*args: Any, **kwargs: Any) -> Any:
            gate = self._safepoints.gate
            if number == 0:
                aborts = self._rng.random() < self._probability
                self._target = self._rng.randrange(self._num_layers) if aborts else None
            if number == self._target and gate._armed:
                self.layers[number] += 1
                gate.attention[0] = gate._armed
            return forward(*args, **kwargs)

        layer.forward = abort_or_forward


def aborts_of(engine: ScriptedEngine) -> RandomAborts:
    """The engine's, made when first asked for."""
    found = getattr(engine, "random_aborts", None)
    if found is None:
        found = engine.random_aborts = RandomAborts(engine)  # type: ignore[attr-defined]
    assert isinstance(found, RandomAborts)
    return found
