"""The offline lane: steps of offline requests only, one of which may be suspended.

Its decodes are the paused requests; SGLang's running batch is the shared lane.
A step suspended at a safepoint keeps its prepared batch, its KV and the outputs of its last
layer. SGLang recreates everything else from the batch when it runs again: attention
metadata, sampling, the relay of last tokens.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_coserve.core.snapshot import SuspendedStep
from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import ForwardKind, has_online_prompts, kind_of, num_decodes
from sglang_coserve.srt.safepoint.gates import order_behind_pass
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Stops
from sglang_coserve.srt.safepoint.safepoints import Safepoints
from sglang_coserve.srt.steps.engine_queues import EngineQueues
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction
from sglang_coserve.srt.steps.step_record import StepRecord
from sglang_coserve.srt.steps.step_tracker import StepTracker, TrackedStep

Req = Any

SUSPENDED: Final = GenerationBatchResult()
"""Result that stands for a batch that was suspended."""


@dataclass(frozen=True, slots=True)
class SuspendedBatch:
    """A batch that has run up to some layer and can be resumed there."""

    tracked: TrackedStep
    batch: Any
    kind: ForwardKind
    layer: int
    """The first layer that has not run."""

    outputs: Any
    """Outputs of the layer before it; None before the first."""


class OfflineLane:
    """Runs the steps of the offline lane, and is the only owner of the suspended one.

    The requests of the suspended step are listed by ``EngineQueues``.
    """

    def __init__(
        self,
        scheduler: Any,
        queues: EngineQueues,
        retraction: OfflineRetraction,
        tracker: StepTracker,
        safepoints: Safepoints,
        answer_aborted: Callable[[Req], None],
        *,
        prefills_wait: bool,
    ) -> None:
        """Create a lane without a step.

        Args:
            scheduler: SGLang's scheduler.
            queues: Where its requests are.
            retraction: Frees KV.
            tracker: Told when a step is suspended, resumed and dropped.
            safepoints: Places in the model where steps are suspended.
            answer_aborted: Ends a request that is aborted in no batch.
            prefills_wait: True if the host runs ahead, but launches prefills only after the step
                before.
        """
        self.safepoints = safepoints
        self._scheduler = scheduler
        self._answer_aborted = answer_aborted
        self._queues = queues
        self._retraction = retraction
        self._tracker = tracker
        self.suspended: SuspendedBatch | None = None
        """The suspended step, if any."""

        self.has_left_decodes = False
        """SGLang left the decodes out of the last batch, which had prefills only."""

        self._launched: Any = None
        """The lane's batch of the last scheduling round."""

        self._prefills_wait = prefills_wait
        self._had_online_prompts: deque[bool] = deque(maxlen=2)
        """Of the last batches that ran; empty where launching prefills waits for nothing."""

    @property
    def num_running(self) -> int:
        """Requests of the last batch that have yet to join the lane's decodes, without the
        unfinished prefill."""
        if self._launched is None or self.suspended is not None:
            return 0
        chunk = _chunk_of(self._launched)
        return sum(not req.finished() and req is not chunk for req in self._launched.reqs)

    def take_launched(self) -> list[Req]:
        """Remove and return those of the last batch that have yet to join the lane's decodes.

        Only of a decode batch: SGLang itself retracts the requests of a prefill batch.
        """
        batch, self._launched = self._launched, None
        if batch is None or batch.forward_mode.is_extend():
            return []
        return [req for req in batch.reqs if not req.finished()]

    def forget_launched(self) -> None:
        """Note that what was prepared in this round does not run; a suspended step stays so."""
        self._launched = None
        suspended, chunk = self.suspended, self._queues.chunk
        if suspended is not None and chunk is not None and chunk is _chunk_of(suspended.batch):
            self._queues.put_chunk(None)

    def seen(self) -> SuspendedStep | None:
        """Return the suspended step as a value of the core."""
        suspended = self.suspended
        if suspended is None:
            return None
        tracked = suspended.tracked
        result = tracked.record.result
        assert result.step is not None, "only planned steps are suspended"
        share = suspended.layer / self.safepoints.num_layers
        return SuspendedStep(result.step, result.batch, share, tracked.stopped_pass_s)

    # --- A scheduling round --------------------------------------------------------------

    def settle(self, last_batch: Any) -> Any:
        """Add the requests of the lane's last batch to its decodes, and return None.

        If the last batch was not the lane's, it is returned. Must be called before SGLang's
        scheduling, which would merge the requests into the running batch.
        """
        batch, self._launched = self._launched, None
        if batch is None:
            return last_batch
        if self.suspended is not None:
            return None  # SGLang's last batch has no requests any more (see ``_keep``).
        scheduler, paused_requests = self._scheduler, self._queues.paused_requests
        away = [req for req in (_chunk_of(batch),) if req is not None]
        chunk = self._queues.chunk
        if chunk is not None:
            away.append(chunk)
            if compat.has_unsaved_kv(chunk):
                scheduler.stash_chunked_request(chunk)
            if chunk.to_finish is not None:
                scheduler._pending_chunked_abort_req = chunk
        if batch.forward_mode.is_extend():
            compat.filter_out(batch, away)
        else:
            batch.filter_batch()
        paused_requests.hold(batch)
        return None

    def launches(self, batch: Any) -> None:
        """Note the lane's batch of this round; None if nothing is to run."""
        self._launched = batch

    def resume(self) -> Any:
        """Return the batch of the suspended step, which this round resumes; SGLang has no other
        unfinished prefill then."""
        suspended = self.suspended
        assert suspended is not None
        assert self._queues.chunk is None
        self._queues.put_chunk(_chunk_of(suspended.batch))
        self._launched = suspended.batch
        self._tracker.resumed(suspended.tracked)
        return suspended.batch

    # --- Run a batch -------------------------------------------------------------------------

    def needs_results(self, batch: Any, stops: Stops | None) -> bool:
        """Return whether the last batch's results must be processed before this batch runs.

        A step that may be suspended, and later dropped, must not depend on pending results.

        Launching prefills takes the host milliseconds (7 to 18 on an H200 with FlashInfer). Where
        it begins after the step before, it would keep the results of that step from who waits. So
        before offline ones the first tokens of online prompts are sent, and the tokens of the step
        after, whose requests have waited for those prompts.
        """
        if batch is None or not compat.results_in_flight(self._scheduler):
            return False
        safepoints = self.safepoints
        if stops is not None and safepoints.are_there and not safepoints.why_it_must_end(batch):
            return True
        return (
            any(self._had_online_prompts)
            and batch.forward_mode.is_extend()
            and not has_online_prompts(batch)
        )

    def run(self, batch: Any, stops: Stops | None, forward: Callable[[Any], Any]) -> Any:
        """Run a batch, or the rest of a suspended one, with ``forward``.

        ``stops`` is None for one that runs to its end, as those of the shared lane do. Returns the
        result, or ``SUSPENDED``.
        """
        if self._prefills_wait:
            self._had_online_prompts.append(has_online_prompts(batch))
        safepoints = self.safepoints
        if stops is None or not safepoints.are_there:
            return forward(batch)
        layer, outputs = self.start(batch)
        if layer == 0 and (why_not := safepoints.why_it_must_end(batch)) is not None:
            safepoints.stats.ran_to_end[why_not] += 1
            return forward(batch)
        safepoints.stats.resumed += layer > 0
        resumption = safepoints.resumption
        try:
            with (
                resumption.resuming(layer, outputs),
                safepoints.armed(self._scheduler.forward_ct, stops),
            ):
                return forward(batch)
        except ForwardPreempted as stop:
            if stop.layer > layer:
                layer, outputs = stop.layer, resumption.outputs
            kind = self._keep(batch, layer, outputs)
            safepoints.stats.suspended(kind, safepoints.gate.stops_for, time.perf_counter())
            return SUSPENDED
        finally:
            resumption.outputs = None

    def start(self, batch: Any) -> tuple[int, Any]:
        """Return the layer from which the lane's batch is to run, and the outputs before it."""
        suspended = self._take()
        if suspended is None:
            return 0, None
        assert suspended.batch is batch
        return suspended.layer, suspended.outputs

    def _keep(self, batch: Any, layer: int, outputs: Any) -> ForwardKind:
        """Keep the lane's batch, which was suspended before ``layer``; return its kind."""
        kind = kind_of(batch)
        assert kind is not None
        suspended = copy.copy(batch)
        suspended.sampling_info.penalizer_orchestrator.batch = suspended
        _point_ended_to_padding(suspended, kind)
        # Layer states (Mamba) were prepared for the first part of the step: not once more.
        suspended.mamba_clear_indices = None
        suspended.mamba_cow_src_indices = suspended.mamba_cow_dst_indices = None
        tracked = self._tracker.suspended(layer, time.perf_counter())
        self.suspended = SuspendedBatch(tracked, suspended, kind, layer, outputs)
        self._queues.suspended_batch = suspended
        if self._queues.chunk is not None and self._queues.chunk is _chunk_of(suspended):
            # Otherwise SGLang would insert KV into the radix cache that is not computed yet.
            self._queues.put_chunk(None)
        # The event loop keeps the original object as its last batch: empty it.
        batch.reqs, batch.forward_mode = [], ForwardMode.DECODE
        batch.chunked_req = batch.decoding_reqs = None
        return kind

    def drop(self) -> StepRecord:
        """Drop the suspended step; return its record.

        Its requests are retracted with the tokens that they had before the step. Requests that
        were aborted meanwhile end here.
        """
        suspended = self._take()
        assert suspended is not None
        batch = suspended.batch
        rids = tuple(req.rid for req in batch.reqs)
        order_behind_pass(self._scheduler)
        num_prefills = len(batch.reqs) - num_decodes(batch, suspended.kind)
        for req in self._retraction.release_unfinished(batch, num_prefills):
            self._answer_aborted(req)
        self.has_left_decodes = False
        return self._tracker.dropped(suspended.tracked, rids, time.perf_counter())

    def _take(self) -> SuspendedBatch | None:
        suspended, self.suspended, self._queues.suspended_batch = self.suspended, None, None
        return suspended


def _point_ended_to_padding(batch: Any, kind: ForwardKind) -> None:
    """Point requests of a prepared batch that have ended to SGLang's places for padding.

    Under overlap scheduling a step may have decodes that ended with the step before it. They have
    released their slot and KV, which may be another request's when the step resumes or is dropped:
    it would overwrite that one's KV, and the token that its next step reads.
    """
    ended = torch.tensor([not compat.holds_kv(req) for req in batch.reqs])
    if not ended.any():
        return
    count = num_decodes(batch, kind)
    assert not ended[: len(batch.reqs) - count].any(), "a prefill has ended before its step"
    batch.req_pool_indices_cpu = batch.req_pool_indices_cpu.masked_fill(ended, 0)
    slots = batch.out_cache_loc.clone()
    ended = ended.to(slots.device)
    batch.req_pool_indices = batch.req_pool_indices.masked_fill(ended, 0)
    slots[-count:].masked_fill_(ended[-count:], 0)
    batch.out_cache_loc = slots


def _chunk_of(batch: Any) -> Req | None:
    """Return the unfinished prefill of a batch, if any.

    ``chunked_req`` of a decode batch is stale: it is that of the prefill batch it once was.
    """
    return batch.chunked_req if batch.forward_mode.is_extend() else None
