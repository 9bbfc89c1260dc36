"""How long an emulated device computes a batch."""

from __future__ import annotations

import math
import random
from typing import Any

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.emulation.settings import Emulation

__all__ = ["StepTimes", "stats_of"]

ForwardBatch = Any


class StepTimes:
    """What a latency model predicts, and what it does not know: noise, slow spells, its error.

    The same batches at the same times take the same, by the seed.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._model: LatencyModel = emulation.latency_model()
        self._noise = random.Random(f"noise {emulation.seed}")
        self._spells = random.Random(f"slow spells {emulation.seed}")
        self._spell_s = self._gap_s()
        """When the current slow spell began, or the next one will."""

    def seconds(self, batch: StepStats, now_s: float) -> float:
        """Return the seconds of a batch that is launched at ``now_s``; times never go back."""
        emulation = self._emulation
        seconds = self._model.predict(batch) * self._slowness(now_s)
        seconds *= _factor(self._noise, emulation.noise)
        if emulation.model_error:
            # Batches of about the same sizes run the same kernels.
            sizes = [value.bit_length() for value in batch]
            of_kernels = random.Random(f"model error {emulation.seed} {sizes}")
            seconds *= _factor(of_kernels, emulation.model_error)
        return seconds

    def _slowness(self, now_s: float) -> float:
        spells = self._emulation.slow_spells
        if spells is None:
            return 1.0
        while now_s >= self._spell_s + spells.last_s:
            self._spell_s += spells.last_s + self._gap_s()
        return spells.factor if now_s >= self._spell_s else 1.0

    def _gap_s(self) -> float:
        spells = self._emulation.slow_spells
        return math.inf if spells is None else self._spells.expovariate(1 / spells.every_s)


def _factor(source: random.Random, variation: float) -> float:
    """Draw from a lognormal distribution with mean 1 and this coefficient of variation."""
    if not variation:
        return 1.0
    sigma = math.sqrt(math.log1p(variation**2))
    return source.lognormvariate(-(sigma**2) / 2, sigma)


def stats_of(batch: ForwardBatch) -> StepStats:
    """Return the sums over the requests of a forward pass. O(requests).

    SGLang does not tell the decodes of a mixed batch from its prefills: what computes one token
    after a prefix counts as a decode.
    """
    mode = batch.forward_mode
    if mode.is_decode():
        known = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        keys = known.tolist()
        return StepStats(decode_requests=len(keys), decode_context_tokens=sum(keys))
    if not mode.is_extend():
        return StepStats()
    new, cached = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    lengths = [(int(tokens), int(context)) for tokens, context in zip(new, cached, strict=True)]
    decodes = [context for tokens, context in lengths if tokens == 1 and context > 0]
    prefills = [one for one in lengths if one[0] > 1 or (one[0] == 1 and not one[1])]
    return StepStats.of(prefills, decodes)
