"""Carries a plan out on SGLang's scheduler, as far as SGLang admits it.

Requests are freed, paused and resumed, and the planned chunks are admitted by SGLang: in a batch
of SGLang's, or in one of the offline lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_coserve.core.step import Lane, PrefillChunk, StepPlan
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.offline_retraction import Prefill

Req = Any
ScheduleBatch = Any


@dataclass(frozen=True, slots=True)
class Executed:
    """What SGLang made of a plan, before its batch runs."""

    result: Any
    """SGLang's own plan."""

    admitted: tuple[PrefillChunk, ...]
    """The prefills that are in its batch."""

    is_started: bool
    """The plan counts as carried out: a batch runs, or SGLang will make one of the decodes."""

    refused: tuple[str, ...] = ()
    """The offline requests that SGLang was offered and did not admit, although nothing runs."""


class PlanExecution:
    """See the module's docstring."""

    def __init__(
        self, parts: EngineParts, waiting: Mapping[str, Req], refuse: Callable[[str], None]
    ) -> None:
        """``waiting`` are the offline requests that wait, by rid; ``refuse`` takes an online one
        out of SGLang's queue."""
        self._view = parts.view
        self._retraction = parts.retraction
        self._chunks = parts.chunks
        self._lane = parts.lane
        self._checkpointing = parts.checkpointing
        self._events = parts.events
        self._waiting = waiting
        self._refuse = refuse
        self._left_decodes: set[int] = set()
        """Micro-batches whose last batch had prefills alone, for a reason of SGLang's."""

    def carry_out(self, plan: StepPlan, running_batch: ScheduleBatch, prefill: Prefill) -> Executed:
        """Prepare the batch of a plan beside SGLang's decodes, with SGLang's admission."""
        if plan.lane is Lane.OFFLINE and not plan.is_idle:
            return self._alone(plan, running_batch, prefill)
        running_batch = self._make_room(plan, running_batch)
        chunks = self._executable(plan)
        turn = self._view.turn
        if turn in self._left_decodes:
            # SGLang runs decodes and prefills apart when one of them returns log-probabilities,
            # and prefills first: so that they take turns, the next prefills wait for a pass.
            chunks = []
        result, admitted = self._chunks.run(
            chunks, self._waiting, running_batch, prefill, mixes_decodes=not plan.skips_decodes
        )
        batch = result.batch_to_run
        self._left_decodes.discard(turn)
        is_apart = batch is not None and batch.decoding_reqs is None
        if is_apart and running_batch.reqs and not plan.skips_decodes:
            self._left_decodes.add(turn)
        is_started = batch is not None or bool(running_batch.reqs)
        runs = is_started or bool(self._view.elsewhere())
        refused = () if runs else self._offered(chunks)
        return Executed(result, admitted, is_started, refused)

    def _offered(self, chunks: list[PrefillChunk]) -> tuple[str, ...]:
        return tuple(chunk.rid for chunk in chunks if chunk.rid in self._waiting)

    def _alone(self, plan: StepPlan, running_batch: ScheduleBatch, prefill: Prefill) -> Executed:
        """Start or resume a step of the offline lane."""
        lane = self._lane
        if plan.resumes:
            return Executed(lane.resume(running_batch), (), is_started=False)
        self._retraction.retract({retraction.rid for retraction in plan.retract}, running_batch)
        chunks = self._executable(plan)
        result, admitted = lane.prepare(plan, chunks, self._waiting, running_batch, prefill)
        is_started = result.batch_to_run is not None
        refused = () if is_started or result.running_batch.reqs else self._offered(chunks)
        return Executed(result, admitted, is_started, refused)

    def _make_room(self, plan: StepPlan, running_batch: ScheduleBatch) -> ScheduleBatch:
        """Carry out a plan but for its prefills; a chunk that gets none is parked with those."""
        for rid in plan.shed:
            self._refuse(rid)
        self._retraction.retract({retraction.rid for retraction in plan.retract}, running_batch)
        if plan.pause:
            self._view.paused_requests.pause(running_batch, set(plan.pause))
            self._events["paused"] += len(plan.pause)
        self._events["resumed"] += len(plan.resume)
        return self._view.paused_requests.resume(running_batch, set(plan.resume))

    def _executable(self, plan: StepPlan) -> list[PrefillChunk]:
        """Return the planned chunks that SGLang can run now."""
        chunks = self._chunks.executable(plan.prefills)
        # Some wait for their KV to be loaded from the host.
        waiting = self._waiting
        held = self._checkpointing.hold_back([waiting[c.rid] for c in chunks if c.rid in waiting])
        return [chunk for chunk in chunks if chunk.rid not in held]
