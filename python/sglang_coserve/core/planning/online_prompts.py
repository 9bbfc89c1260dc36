"""Decides whether online prompts run before the online decodes, and how long their pieces are."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cached_property
from itertools import accumulate
from typing import Final

from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_memory import Prompt
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step_stats import StepStats

_LATER: Final = 0.15
"""Share of their time by which online prompts may end later to keep the pace of streams. Simulated
(8B on an H100, the demo's load; Azure's conversations at 50%, two seeds), the P99 gap is 63 and 53
ms with 0.1, 20 and 43 ms with 0.15, 20 and 33 ms with 0.25. P99 TTFT at 50% is 1.13, 1.09 and
1.14 x alone."""


class OnlinePrompts:
    """Online prompts of a step to which nothing has been added yet.

    Prompts beyond the first step are taken to have the mean length of the prompts in the first.
    Sums are made once per step, when first asked for: O(prompts that fit the step).
    """

    def __init__(self, batch: StepBuilder) -> None:
        self._batch = batch

    @cached_property
    def _first(self) -> list[Request]:
        return self._batch.first_prompts(self._batch.free_tokens)

    @cached_property
    def _first_tokens(self) -> int:
        return sum([one.tokens_to_compute for one in self._first])

    @cached_property
    def _all_tokens(self) -> float:
        num_prompts = len(self._batch.online_prefills) + len(self._batch.snapshot.waiting)
        return self._first_tokens * num_prompts / len(self._first)

    @cached_property
    def _alone(self) -> StepStats:
        """Sums over a step of these prompts alone, as far as they fit."""
        stats, free_tokens = StepStats(), self._batch.free_tokens
        for one in self._first:
            tokens = min(one.tokens_to_compute, free_tokens - stats.prefill_tokens)
            if tokens > 0:
                stats = stats.with_prefill(tokens, one.length_tokens - one.tokens_to_compute)
        return stats

    @cached_property
    def _alone_s(self) -> float:
        return self._batch.model.predict(self._alone)

    @property
    def _alone_token_s(self) -> float:
        return self._alone_s / self._alone.prefill_tokens

    def stall_s(self) -> float:
        """Return the seconds by which online prompts may exceed the pace of streams.

        Prompts are cut to keep the pace. Shorter pieces delay first tokens, since more steps have
        the decodes, too. The pieces are as long as first tokens need (``_most_token_s``), and no
        step exceeds the P99 gap alone. O(log tokens) predictions for a step with prompts.
        """
        batch = self._batch
        if not batch.stall_s or not batch.has_online_prompts or batch.context.is_plain:
            return 0.0
        token_s, context_tokens = self._most_token_s(), self._first[0].computed_tokens
        decodes, predict = batch.online_decode_stats, batch.model.predict

        def is_enough(tokens: int) -> bool:
            return predict(decodes.with_prefill(tokens, context_tokens)) <= tokens * token_s

        most_tokens = min(batch.free_tokens, self._first_tokens)
        if not is_enough(most_tokens):
            return batch.stall_s
        tokens = 1 + bisect_left(range(1, most_tokens), True, key=is_enough)
        step_s = predict(decodes.with_prefill(tokens, context_tokens)) / batch.context.timely
        return min(max(step_s - batch.slack_s, 0.0), batch.stall_s)

    def _most_token_s(self) -> float:
        """Return the longest time in seconds that a prompt token may take beside decodes.

        All online prompts together may end later by what an arrival may wait, or by ``_LATER`` of
        their time. No first token may miss its target for the decodes in the steps.
        """
        batch, first = self._batch, self._first
        alone_s, all_tokens = self._alone_token_s, self._all_tokens
        waited_s = batch.snapshot.begins_s - first[0].info.arrival_s
        later_s = max(batch.context.allowance.arrival_s, _LATER * (waited_s + all_tokens * alone_s))
        ends = accumulate(one.tokens_to_compute for one in first)
        due_s = [batch.due_s(one) * batch.context.timely for one in first]
        in_time_s = min([due / end for due, end in zip(due_s, ends, strict=True)])
        return max(alone_s, min(alone_s + later_s / all_tokens, in_time_s))

    def go_first(self, step_s: float) -> bool:
        """Return whether online prompts run without decodes, as in plain SGLang.

        SGLang stalls the decodes for every prompt. Where nothing asks for shorter gaps than plain
        SGLang has, and no offline work is there, its order is kept. Otherwise decodes wait as long
        as they can, and then join the prompts: that delays first tokens less than a step of their
        own, or than joining every step. Where no step has tokens for all decodes and a piece of a
        prompt, prompts go first, too. The step lasts ``step_s``, as long as the decodes can wait,
        so that prompts spread over several steps, with the decodes in each. Prompts go first if
        that delays them by more than offline work may add (``prompt_s``), and makes a first token
        late.
        """
        batch = self._batch
        decodes, memory = batch.online_decodes, batch.memory
        if not decodes or not batch.has_online_prompts:
            return False
        if not memory.has_room(memory.kv_to_decode(decodes), requests=len(decodes)):
            return False
        if not batch.shortest_chunk(Prompt.of(batch.first_prompts(1)[0]), beside=len(decodes)):
            return True
        if batch.context.config.overload is Overload.SHED:
            return False
        if batch.context.is_plain:
            return not batch.context.mixes_decodes
        if math.isinf(step_s):
            return False
        if self._alone_s + batch.decodes_s <= step_s:
            return True
        token_s = self._mixed_token_s(step_s)
        if self._all_tokens * (token_s - self._alone_token_s) <= batch.context.prompt_s:
            return False
        ends = accumulate(token_s * one.tokens_to_compute for one in self._first)
        return any(
            end_s > batch.due_s(one) * batch.context.timely
            for one, end_s in zip(self._first, ends, strict=True)
        )

    def _mixed_token_s(self, step_s: float) -> float:
        """Return the seconds that a prompt token takes in a step of ``step_s`` with the decodes.

        Infinite if no prompt token fits beside the decodes.
        """
        batch, context_tokens = self._batch, self._first[0].computed_tokens
        decodes = batch.online_decode_stats
        limit_tokens = min(batch.free_tokens, self._first_tokens)
        tokens = batch.model.max_prefill_tokens(decodes, context_tokens, limit_tokens, step_s)
        if not tokens:
            return math.inf
        return batch.model.predict(decodes.with_prefill(tokens, context_tokens)) / tokens
