"""Stops steps of the offline lane before random layers, in a process with a ``ScriptedEngine``,
and drops some of them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from srt.scripted_engine import ScriptedEngine


class RandomSuspensions:
    """Tells the gate of an arrival in the middle of passes, and counts layers."""

    def __init__(self, engine: ScriptedEngine) -> None:
        """Stand before every layer of the engine's model."""
        from sglang_coserve.srt.safepoint.instrument import decoder_layers

        parts = engine.scheduler.parts
        self.lane = parts.lane
        self._due_gate = parts.lane.safepoints.gate
        self._rng = random.Random(0)
        self._probability = self._drops = 0.0
        self._target: int | None = None
        self.layers: Counter[int] = Counter()
        """Layers before which steps were stopped."""

        self.tokens: Counter[int] = Counter()
        """Tokens that each layer has computed."""

        layers = decoder_layers(engine.scheduler.tp_worker.model_runner.model)
        self.num_layers = len(layers)
        for number, layer in enumerate(layers):
            self._stand_before(number, layer)
            names = ("mlp", "block_sparse_moe", "feed_forward")
            self._count(
                number, next(getattr(layer, name) for name in names if hasattr(layer, name))
            )
        start = self.lane.start

        def start_and_choose(batch: Any) -> Any:
            stops = self._rng.random() < self._probability
            self._target = self._rng.randrange(self.num_layers) if stops else None
            return start(batch)

        self.lane.start = start_and_choose
        admission = parts.admission
        admit = admission.admit

        def drop_or_not_and_admit(*args: Any) -> Any:
            if self._rng.random() < self._drops:
                admission.give_up()
            return admit(*args)

        admission.admit = drop_or_not_and_admit

    @contextmanager
    def stopping(self, seed: int, probability: float, drops: float = 0.0) -> Iterator[None]:
        """Stop this part of the lane's passes within it, and drop a suspended step with probability
        ``drops`` in each pass."""
        self._rng.seed(seed)
        self._probability, self._drops = probability, drops
        self.tokens.clear()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop no more."""
        self._probability = self._drops = 0.0

    def _stand_before(self, number: int, layer: Any) -> None:
        forward = layer.forward

        def stop_or_forward(*args: Any, **kwargs: Any) -> Any:
            # The safepoint stands behind this, and asks the gate.
            if number == self._target and self._due_gate.attention[0]:
                self.layers[number] += 1
                someone = RequestInfo("someone", RequestClass.ONLINE, 1, 1, time.perf_counter())
                self._due_gate.stops_for = (someone,)
            return forward(*args, **kwargs)

        layer.forward = stop_or_forward

    def _count(self, number: int, mlp: Any) -> None:
        forward = mlp.forward

        def count_and_forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            self.tokens[number] += len(hidden_states)
            return forward(hidden_states, *args, **kwargs)

        mlp.forward = count_and_forward


def suspensions_of(engine: ScriptedEngine) -> RandomSuspensions:
    """The engine's, made when first asked for."""
    found = getattr(engine, "random_suspensions", None)
    if found is None:
        found = engine.random_suspensions = RandomSuspensions(engine)  # type: ignore[attr-defined]
    return found
