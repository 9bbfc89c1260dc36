"""OOCO: bottleneck-based scheduling (Wu et al., §3.4)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar, Final

from sglang_coserve.core.bottleneck import is_compute_saturated
from sglang_coserve.core.planning.offline_phase import (
    decode_offline,
    num_fitting,
    prefill_offline,
)
from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policy import Policy, retraction_rank
from sglang_coserve.core.ranges import NOT_NEGATIVE
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import Bound
from sglang_coserve.core.step_stats import StepStats

_RETRACTION_WEIGHT: Final = 1 / 32


class Role(Enum):
    """Which pool an instance belongs to (§3.2)."""

    STRICT = "strict"
    """Decodes only, each step within the TPOT target."""

    RELAXED = "relaxed"
    """Prefills, and decodes of offline requests, without a bound on step time."""

    BOTH = "both"
    """One instance for everything; the paper has two pools."""


@dataclass
class OocoPolicy(Policy):
    """Makes four decisions in the life of a request (§3.4), for one instance.

    1. Online preemption: an online prefill interrupts offline work. If it needs
       memory, the longest requests are retracted when compute is the bottleneck, so that the batch
       keeps its size, else the shortest, so that less is computed again.
    2. Gating: a new offline request is prefilled only if the time saved by the larger decode
       batch exceeds the expected cost of its retraction.
    3. Migration between instances is ``core.migration``, for the caller of two.
    4. Mix decoding selection (Algorithm 2): all online decodes; up to K offline
       ones at random, against starvation; then the shortest, as many as keep
       the TPOT target.

    Differences from the paper: ``Role.BOTH`` runs prefill chunks beside decodes within the TPOT
    target, as one instance must. The target is the strictest among the online decodes if
    requests bring their own, and own TTFT targets bound the step that computes the prompt.
    The probability of a retraction is measured; the paper does not say where its
    cost model takes it from. Draws are seeded.
    """

    name: ClassVar[str] = "ooco"

    role: Role = Role.BOTH
    random_picks: Annotated[int, NOT_NEGATIVE] = 8
    """K of Algorithm 2."""

    _retraction_rate: float = field(default=0.0, init=False)
    """Moving average of the share of offline admissions that end in a retraction, 0 to 1."""

    def victims(self, batch: StepBuilder) -> Sequence[Request]:
        """See ``Policy.victims``: parked and paused first, then by bottleneck (§3.4.1)."""
        decodes = len(batch.online_decodes) + len(batch.offline_decodes)
        sign = -1 if is_compute_saturated(batch.model, decodes) else 1
        return sorted(
            batch.offline,
            key=lambda request: (retraction_rank(request), sign * request.computed_tokens),
        )

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        tpot_s = batch.least_tpot_s(batch.targets.token_s or math.inf)
        budget_s = tpot_s * batch.context.timely
        if self.role is Role.RELAXED or not batch.has_online:
            budget_s = math.inf
        decode_online(batch)
        if self.role is not Role.STRICT:
            prefill_online(batch, budget_s)
            if self.role is Role.RELAXED and batch.chunks:
                # A step with an online prefill has no offline work.
                batch.limit_offline(0.0, Bound.PROMPTS_FIRST)
        batch.limit_offline(budget_s, Bound.GAP)
        self._decode_mix(batch)
        if self.role is not Role.STRICT:
            batch.admits_offline &= _saves_time(batch, self._retraction_rate)
            prefill_offline(batch)

    def retracted(self) -> None:
        """See ``Policy.retracted``."""
        self._retraction_rate += _RETRACTION_WEIGHT * (1.0 - self._retraction_rate)

    def finished(self) -> None:
        """See ``Policy.finished``."""
        self._retraction_rate -= _RETRACTION_WEIGHT * self._retraction_rate

    def _decode_mix(self, batch: StepBuilder) -> None:
        """Add offline decodes by Algorithm 2. O(requests log requests) if not all fit."""
        requests = batch.memory.without_retracted(batch.offline_decodes)
        if num_fitting(batch, requests) < len(requests):
            draws = random.Random(batch.context.config.seed << 32 | batch.context.step)
            draws.shuffle(requests)
            # First the decodes that cannot pause: a step that left them out would retract them.
            requests.sort(key=lambda request: request.info.can_pause)
            chosen: list[Request] = []
            context_tokens = 0
            for request in requests[: self.random_picks]:
                longer_tokens = context_tokens + request.computed_tokens
                predicted_s = batch.predict_with_decodes(len(chosen) + 1, longer_tokens)
                if predicted_s <= batch.offline_budget_s:
                    chosen.append(request)
                    context_tokens = longer_tokens
            rest = sorted(
                requests[self.random_picks :],
                key=lambda request: (request.info.can_pause, request.computed_tokens),
            )
            requests = chosen + rest
        decode_offline(batch, requests)


def _saves_time(batch: StepBuilder, retraction_rate: float) -> bool:
    """Return whether the next offline request is worth its prefill (§3.4.2).

    One more request beside b decodes lowers the time per token from T(b)/b to
    T(b + 1)/(b + 1), for as many steps as it has tokens to generate. The new request is assumed to
    have average length, since its own context must be read sooner or later in any case. The
    cost is one more prefill, times the probability that it is retracted.
    """
    request = batch.context.queue.peek(batch.snapshot.now_s)
    decodes = batch.stats.decode_requests
    if request is None or decodes == 0:
        return True
    length_tokens = request.num_prompt_tokens + request.num_generated_tokens
    now = StepStats(
        decode_requests=decodes, decode_context_tokens=batch.stats.decode_context_tokens
    )
    before_s = batch.model.predict(now) * (decodes + 1) / decodes
    after_s = batch.model.predict(now.with_decode(now.decode_context_tokens // decodes))
    new_tokens = request.max_new_tokens - request.num_generated_tokens
    prefill_s = batch.model.predict(StepStats().with_prefill(length_tokens, 0))
    return new_tokens * (before_s - after_s) >= retraction_rate * prefill_s
