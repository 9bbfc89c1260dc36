"""Builds the plan of one step from the work that a policy adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.planning.planned_step import StepMemory, StepWork, VictimOrder
from sglang_coserve.core.planning.step_requests import StepRequests
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step import ExpectedResult, Lane, PrefillChunk, StepPlan
from sglang_coserve.metrics import SloTargets

__all__ = ["StepBuilder"]

_DECODING = RequestState.DECODING
_PAUSED = RequestState.PAUSED
_PREFILLING = RequestState.PREFILLING
_WAITING = RequestState.WAITING


class DecodeDeadlines:
    """Tells how long a step may take before online decodes miss their TPOT targets."""

    def __init__(self, requests: StepRequests, tpot_s: float | None) -> None:
        """Look up when each decode is due. O(requests).

        Args:
            requests: The requests of the engine.
            tpot_s: Target of requests without their own.
        """
        begins_s = requests.snapshot.begins_s
        self._decodes = requests.online_decodes
        due_s = [
            (begins_s if last_s is None else last_s) + target_s
            for info, _, _, _, _, last_s in requests.online_decodes
            if (target_s := info.tpot_target_s or tpot_s) is not None
        ]
        self.elsewhere_s = math.inf
        if requests.snapshot.elsewhere:
            targets_s = [
                request.info.tpot_target_s or tpot_s
                for request in requests.snapshot.elsewhere
                if request.info.is_online
            ]
            self.elsewhere_s = min([s for s in targets_s if s is not None], default=math.inf)
        """The strictest TPOT target of the online requests in other micro-batches."""
        self.slack_s = min(min(due_s, default=math.inf) - begins_s, self.elsewhere_s)
        """How long the step may take before the first online decode misses its TPOT target. A
        decode in another micro-batch is assumed to have got its last token just now."""

    def least_tpot_s(self, default_s: float) -> float:
        """Return the strictest TPOT target of the online decodes, in seconds. O(requests).

        ``default_s`` is the target of requests without their own, and the result if no online
        request decodes.
        """
        targets_s = [request.info.tpot_target_s or default_s for request in self._decodes]
        return min(min(targets_s, default=default_s), self.elsewhere_s)


class StepBuilder:
    """Collects the work of one step during a call of ``Scheduler.plan``.

    A policy adds work to it: of ``requests`` and from the queues, as long as there are tokens
    left here, and KV and request slots in ``memory``. The sums and the predicted latency are
    ``work``. Latency limits are up to the policy, which finds in ``deadlines`` when online decodes
    are due.
    """

    def __init__(
        self,
        snapshot: EngineSnapshot,
        model: LatencyModel,
        targets: SloTargets,
        victim_order: VictimOrder,
        lane: Lane = Lane.SHARED,
        *,
        rides: bool = True,
    ) -> None:
        """Start with an empty batch. O(requests).

        Args:
            snapshot: The engine; for the offline lane, without online requests.
            model: Predicts the latency of the batch.
            targets: TTFT and TPOT targets of online requests without their own.
            victim_order: Order in which offline requests are retracted.
            lane: Lane of the step.
            rides: Paused offline decodes may join a step of the shared lane.
        """
        self.snapshot = snapshot
        self.lane = lane
        self.model = model
        self.targets = targets

        self.offline_budget_s = math.inf
        self.has_left_over_online = False
        """An online prompt got fewer tokens than it could use, so offline work gets none."""
        self.is_deadline_bound = False
        self.online_part_s = 0.0
        self.prompts_s = 0.0
        """Predicted latency of the step's online prompts alone."""
        self.skips_decodes = False
        """The step runs prompts only: no request decodes in it."""
        self.admits_offline = True
        """False when an online request waits for KV that new offline requests must not take."""
        self.free_tokens = snapshot.max_batch_tokens

        self._shed: list[str] = []
        self.requests = StepRequests(snapshot, lane, rides=rides)
        self.work = StepWork(model)
        self.memory = StepMemory(self.requests, victim_order)
        self.deadlines = DecodeDeadlines(self.requests, targets.tpot_s)

    def reserve_rest_for_online(self) -> None:
        """Leave no budget for offline work, since an online prompt got less than it could use."""
        self.has_left_over_online = True
        self.offline_budget_s = 0.0

    def limit_tokens(self, tokens: int) -> None:
        """Add at most ``tokens`` more tokens to the batch."""
        self.free_tokens = min(self.free_tokens, tokens)

    # --- decodes ---

    def decode(self, requests: Sequence[Request]) -> None:
        """Add decodes; the caller has checked that there is KV for them. O(requests)."""
        if not requests:
            return
        self.work.add_decodes(requests)
        self.memory.take_for_decodes(requests)
        self.free_tokens -= len(requests)

    # --- prefills ---

    def longest_chunk(self, context_tokens: int, rest_tokens: int, budget_s: float) -> int:
        """Return the longest chunk that keeps the batch within the latency budget."""
        tokens = min(rest_tokens, self.free_tokens)
        may_be_cut = tokens > 0 and budget_s < math.inf
        # Mostly it fits whole; the prediction is kept for when it is added.
        if may_be_cut and self.work.predict_with_prefill(tokens, context_tokens) > budget_s:
            tokens = self.model.max_prefill_tokens(
                self.work.stats, context_tokens, tokens, budget_s
            )
        return self.memory.align_chunk(context_tokens, rest_tokens, tokens)

    def prefill(
        self, rid: str, tokens: int, context_tokens: int, kv_tokens: int, *, is_new: bool
    ) -> None:
        """Add a chunk of ``tokens`` prompt tokens, and reserve ``kv_tokens`` of KV for it."""
        assert 0 < tokens <= self.free_tokens, f"{rid}: {tokens} of {self.free_tokens} tokens"
        self.work.add_prefill(tokens, context_tokens)
        self.memory.take_for_prefill(rid, tokens, kv_tokens, is_new=is_new)
        self.free_tokens -= tokens

    def shed(self, request: Request) -> None:
        """Refuse a waiting online request."""
        self._shed.append(request.info.rid)

    # --- the plan ---

    @property
    def chunks(self) -> tuple[PrefillChunk, ...]:
        """The prefill chunks added so far, in order."""
        return tuple(self.memory.chunks.values())

    def build(
        self,
        step: int,
        waiting_users: frozenset[str | None] | None = None,
        until_s: float = math.inf,
    ) -> StepPlan:
        """Return the plan: decodes not added pause, prefills not added are parked. O(requests).

        A decode that cannot pause is retracted instead. All but its last page stays in the prefix
        cache as long as there is room, so that little is computed again.
        """
        memory, seen = self.memory, self.requests
        assert memory.free_kv_tokens >= 0, f"KV over capacity by {-memory.free_kv_tokens} tokens"
        num_decodes = sum(map(len, memory.decodes))
        if self.lane is Lane.OFFLINE and not num_decodes:
            self.skips_decodes = True
        all_go_on = self.lane is Lane.SHARED and num_decodes == seen.num_decodes
        all_stay = self.skips_decodes or (all_go_on and not seen.has_paused)
        decoding = set[str]() if all_stay else memory.decoding()
        pause: list[str] = []
        resume: list[str] = []
        park: list[str] = []
        retractions = memory.retractions
        stays_as = _PAUSED if self.lane is Lane.OFFLINE else _DECODING
        for request in seen.prefills if all_stay else self.snapshot.admitted:
            info, state, _, _, _, _ = request
            rid = info.rid
            if state is stays_as and rid in decoding:
                continue
            if rid in retractions:
                continue
            if state is _DECODING or state is _PAUSED:
                move = self._move(request, is_added=rid in decoding)
                if move is _PAUSED:
                    pause.append(rid)
                elif move is _DECODING:
                    resume.append(rid)
                elif move is _WAITING:
                    memory.retract(request, 0)
            elif state is _PREFILLING and rid not in memory.chunks:
                park.append(rid)
        return StepPlan(
            step=step,
            lane=self.lane,
            until_s=until_s,
            shed=tuple(self._shed),
            retract=tuple(retractions.values()),
            pause=tuple(pause),
            resume=tuple(resume),
            park=tuple(park),
            prefills=self.chunks,
            skips_decodes=self.skips_decodes,
            batch=self.work.stats,
            predicted_s=self.work.predicted_s,
            budget_s=self.offline_budget_s,
            expected=ExpectedResult(
                online_part_s=self.online_part_s,
                is_deadline_bound=self.is_deadline_bound,
                added_s=self._added_s(),
                waits_online=self.requests.has_online_prompts,
                waiting_users=waiting_users,
            ),
        )

    # --- inside ---

    def _added_s(self) -> float:
        """Return what the step adds to first tokens: all but its prompts, or its online work."""
        online_s = self.prompts_s if self.requests.has_online_prompts else self.online_part_s
        return max(self.work.predicted_s - online_s, 0.0)

    def _move(self, request: Request, *, is_added: bool) -> RequestState | None:
        """Return the state that a decode request enters; None if its state does not change."""
        is_paused = request.state is _PAUSED
        if self.lane is Lane.OFFLINE:
            if is_added:
                return None if is_paused else _PAUSED
            return _WAITING if is_paused else None
        if is_paused:
            return _DECODING if is_added else None
        if is_added:
            return None
        return _PAUSED if request.info.can_pause else _WAITING
