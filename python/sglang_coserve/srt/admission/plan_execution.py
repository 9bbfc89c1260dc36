"""Carries a plan out on SGLang's scheduler, as far as SGLang admits it.

Requests are freed, paused and resumed, and the planned chunks are admitted by SGLang: in a batch
of SGLang's, or in one of the offline lane. Chunks that SGLang cannot run together are left for a
later step: it continues only one unfinished prefill at a time. That one is limited to the planned
tokens (``chunk_limits``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.managers.scheduler import NextBatchPlan

from sglang_coserve.core.step import Lane, PrefillChunk, StepPlan
from sglang_coserve.srt.admission.chunk_limits import limit_chunk
from sglang_coserve.srt.admission.online_only import OnlineOnly
from sglang_coserve.srt.compat import prefix_tokens
from sglang_coserve.srt.forward_kind import prefilled
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.offline_retraction import Prefill
from sglang_coserve.srt.steps.paused_requests import empty_batch

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
    """A step of the core has begun: a batch runs, or SGLang will make one of the decodes."""

    refused: tuple[str, ...] = ()
    """The offline requests that SGLang was offered and did not admit, although nothing runs."""

    leaves_online: bool = False
    """SGLang has a rule that plans do not know: it was offered online prompts, admitted none, and
    has memory left. Or it is to displace an online request by one of a higher priority."""


class PlanExecution:
    """See the module's docstring; ``install_chunk_limits`` must have been called."""

    def __init__(
        self,
        parts: EngineParts,
        waiting: Mapping[str, Req],
        refuse: Callable[[str], None],
        give_up: Callable[[], None],
    ) -> None:
        """Carry out nothing yet.

        Args:
            parts: The parts of the engine.
            waiting: The offline requests that wait, by rid.
            refuse: Takes an online request out of SGLang's queue.
            give_up: Drops the suspended step.
        """
        self._scheduler = parts.scheduler
        self._pools = parts.pools
        self._requests = parts.requests
        self._queues = parts.queues
        self._paused = parts.queues.paused_requests
        self._retraction = parts.retraction
        self._lane = parts.lane
        self._kv_store = parts.kv_store
        self._events = parts.events
        self._waiting = waiting
        self._refuse = refuse
        self._give_up = give_up
        self._left_decodes: set[int] = set()
        """Micro-batches whose last batch had prefills alone, for a reason of SGLang's."""

    def carry_out(self, plan: StepPlan, running_batch: Any, prefill: Prefill) -> Executed:
        """Prepare the batch of a plan beside SGLang's decodes, with SGLang's admission."""
        if isinstance(plan, OnlineOnly):
            return self._online_only(plan, running_batch, prefill)
        is_alone = plan.lane is Lane.OFFLINE and not plan.is_idle
        executed = (self._alone if is_alone else self._shared)(plan, running_batch, prefill)
        if self._is_displacing(plan, running_batch):
            executed = replace(executed, leaves_online=True)
        return executed

    def _is_displacing(self, plan: StepPlan, running_batch: Any) -> bool:
        """Return whether the first online request that waits is left out, and goes before others
        that run."""
        waiting = self._queues.waiting_in_turn
        if not waiting or waiting[0].rid in {chunk.rid for chunk in plan.prefills}:
            return False
        online = (req for req in running_batch.reqs if not is_offline(req))
        return self._queues.displaces_another(waiting[0], online)

    def _shared(self, plan: StepPlan, running_batch: Any, prefill: Prefill) -> Executed:
        """Start a step of the shared lane, or none if the plan is idle."""
        running_batch = self._make_room(plan, running_batch)
        chunks = self._executable(plan)
        turn = self._queues.turn
        if turn in self._left_decodes:
            # SGLang runs decodes and prefills apart when one of them returns log-probabilities,
            # and prefills first: so that they take turns, the next prefills wait for a pass.
            chunks = []
        result, admitted = self._admit(plan, chunks, running_batch, prefill)
        batch = result.batch_to_run
        self._left_decodes.discard(turn)
        is_apart = batch is not None and batch.decoding_reqs is None
        if is_apart and running_batch.reqs and not plan.skips_decodes:
            self._left_decodes.add(turn)
        is_started = batch is not None or bool(running_batch.reqs)
        runs = is_started or bool(self._queues.elsewhere())
        refused = () if runs else self._offered(chunks)
        has_online = any(chunk.rid not in self._waiting for chunk in self._new(chunks))
        leaves_online = has_online and not admitted and not result.running_batch.batch_is_full
        return Executed(result, admitted, is_started, refused, leaves_online)

    def _alone(self, plan: StepPlan, running_batch: Any, prefill: Prefill) -> Executed:
        """Start or resume a step of the offline lane, beside which ``running_batch`` does not run.

        The lane's decodes are the paused requests.
        """
        lane, paused = self._lane, self._paused
        if plan.resumes:
            self._park_chunk()
            result = NextBatchPlan(batch_to_run=lane.resume(), running_batch=running_batch)
            return Executed(result, (), is_started=False)
        self._retraction.retract({retraction.rid for retraction in plan.retract}, running_batch)
        chunks = self._executable(plan)
        if plan.pause and all(map(is_offline, running_batch.reqs)):
            # The whole batch moves, so requests may have state other than KV.
            self._events["paused"] += len(plan.pause)
            paused.hold(running_batch)
            running_batch = empty_batch()
        else:
            self._pause(plan, running_batch)
        decodes = paused.take_batch()
        if decodes.reqs:
            decodes.filter_batch()
        offered = () if lane.has_left_decodes and decodes.reqs else chunks
        # Also without chunks, because SGLang then checks which copies from the host have ended.
        result, admitted = self._admit(plan, offered, decodes, prefill)
        batch, decodes = result.batch_to_run, result.running_batch
        lane.has_left_decodes = batch is not None and bool(decodes.reqs)
        if batch is None and decodes.reqs and not plan.skips_decodes:
            batch = decodes = self._scheduler.update_running_batch(decodes)
            batch = batch if batch.reqs else None
        if decodes is not batch:
            paused.hold(decodes)
        lane.launches(batch)
        result = NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
        runs = batch is not None or bool(running_batch.reqs)
        return Executed(result, admitted, batch is not None, () if runs else self._offered(chunks))

    def _make_room(self, plan: StepPlan, running_batch: Any) -> Any:
        """Carry out a plan but for its prefills; a chunk that gets none is parked with those."""
        for rid in plan.shed:
            self._refuse(rid)
        self._retraction.retract({retraction.rid for retraction in plan.retract}, running_batch)
        self._pause(plan, running_batch)
        self._events["resumed"] += len(plan.resume)
        return self._paused.resume(running_batch, set(plan.resume))

    def _pause(self, plan: StepPlan, running_batch: Any) -> None:
        if plan.pause:
            self._paused.pause(running_batch, set(plan.pause))
            self._events["paused"] += len(plan.pause)

    # --- Without the core --------------------------------------------------------------------

    def _online_only(self, plan: OnlineOnly, running_batch: Any, prefill: Prefill) -> Executed:
        """Let SGLang admit what is in its queue; see ``OnlineOnly``."""
        if plan.puts_back:
            self._put_back(running_batch)
        if plan.retracts_offline and self._lane.suspended is not None:
            self._give_up()
        if self._queues.chunk is not None and is_offline(self._queues.chunk):
            # SGLang would go on with it before it looks at its queue.
            self._park_chunk()
        if plan.retracts_offline:
            reqs = (*running_batch.reqs, *self._paused.reqs)
            self._retraction.retract({req.rid for req in reqs if is_offline(req)}, running_batch)
        self._make_room_for_online_chunk(running_batch)
        result = self._retraction.admit(running_batch, prefill)
        return Executed(result, (), is_started=False)

    def _put_back(self, running_batch: Any) -> None:
        """Put every request back in its place after a plan that failed halfway. O(requests).

        A request that was on its way from one place to another waits again.
        """
        self._queues.withdraw()
        self._lane.forget_launched()
        placed = {id(req) for req in self._queues.requests_with_kv(running_batch)}
        placed |= {id(req) for req in self._queues.elsewhere()}
        online, offline = self._requests.with_kv()
        for req in (*online, *offline):
            if id(req) not in placed and not req.finished():
                self._retraction.release(req)

    def _make_room_for_online_chunk(self, running_batch: Any) -> None:
        """Free the memory of an online prompt's next chunk, for which SGLang does not wait."""
        req = self._queues.chunk
        if req is None or is_offline(req):
            return
        remaining = len(req.origin_input_ids) + len(req.output_ids) - prefix_tokens(req)
        chunk = min(remaining, self._scheduler.chunked_prefill_size or remaining)
        while self._pools.headroom_tokens < chunk + self._scheduler.page_size:
            if not self._retraction.retract_one(running_batch):
                return

    # --- Chunks ------------------------------------------------------------------------------

    def _executable(self, plan: StepPlan) -> list[PrefillChunk]:
        """Return the leading chunks that SGLang can run now in one batch, in its order.

        At most one chunk continues an unfinished prefill, and it comes first. Some wait for their
        KV to be loaded from the host.
        """
        begun = {req.rid for req in self._paused.parked}
        if self._queues.chunk is not None:
            begun.add(self._queues.chunk.rid)
        continued: list[PrefillChunk] = []
        started: list[PrefillChunk] = []
        for chunk in plan.prefills:
            if chunk.rid not in begun:
                started.append(chunk)
            elif continued:
                break
            else:
                continued.append(chunk)
        waiting, wants = self._waiting, self._kv_store.wants
        chunks = [*continued, *started]
        return [c for c in chunks if c.rid not in waiting or not wants(waiting[c.rid])]

    def _new(self, chunks: Iterable[PrefillChunk]) -> Iterator[PrefillChunk]:
        """Yield the chunks with which a prompt begins."""
        chunk = self._queues.chunk
        return (one for one in chunks if chunk is None or one.rid != chunk.rid)

    def _offered(self, chunks: Iterable[PrefillChunk]) -> tuple[str, ...]:
        return tuple(chunk.rid for chunk in chunks if chunk.rid in self._waiting)

    def _admit(
        self, plan: StepPlan, chunks: Sequence[PrefillChunk], decodes: Any, prefill: Prefill
    ) -> tuple[Any, tuple[PrefillChunk, ...]]:
        """Offer exactly these ``_executable`` chunks to SGLang, with all ``decodes`` or none.

        Returns SGLang's plan, and the admitted chunks with their real lengths, which exceed the
        planned ones if the cache has lost a prefix since.
        """
        queues, waiting = self._queues, self._waiting
        self._choose_chunk(chunks)
        begun = None if queues.chunk is None else queues.chunk.rid
        offline = [waiting[c.rid] for c in chunks if c.rid in waiting]
        rids = [c.rid for c in chunks if c.rid not in waiting and c.rid != begun]
        queues.offer(rids, offline)
        # SGLang counts whole pages; a plan counts only the tokens in a prompt's last page.
        page = self._scheduler.page_size
        tokens = max(sum(-(-chunk.tokens // page) * page for chunk in chunks), page)
        mixes_decodes = not plan.skips_decodes
        if mixes_decodes:
            tokens += len(decodes.reqs)  # SGLang subtracts them from the chunk size.
        decodes.batch_is_full = False
        with queues.chunk_size(tokens, mixes_decodes=mixes_decodes):
            # This may retract requests: SGLang also reserves room for a request's output.
            result = self._retraction.admit(decodes, prefill)
        self._events["admitted"] += len(queues.withdraw())
        batch = result.batch_to_run
        if batch is None:
            return result, ()
        _correct_mixed_prefix_lens(batch)
        rids = [req.rid for req in prefilled(batch)]
        lens = dict(zip(rids, batch.extend_lens, strict=False))
        # What is in no batch was not admitted, or SGLang has refused it meanwhile.
        admitted = (chunk for chunk in chunks if chunk.rid in lens)
        return result, tuple(chunk._replace(tokens=lens[chunk.rid]) for chunk in admitted)

    def _choose_chunk(self, chunks: Sequence[PrefillChunk]) -> None:
        """Make the prefill that these chunks continue, if any, SGLang's unfinished one."""
        queues = self._queues
        if queues.chunk is not None and queues.chunk.rid not in {chunk.rid for chunk in chunks}:
            self._park_chunk()
        if chunks and (parked := self._paused.unpark(chunks[0].rid)) is not None:
            assert queues.chunk is None
            queues.put_chunk(parked)
        if queues.chunk is not None:
            limit_chunk(queues.chunk, chunks[0].tokens)

    def _park_chunk(self) -> None:
        self._events["parked"] += self._queues.park_chunk()


def _correct_mixed_prefix_lens(batch: ScheduleBatch) -> None:
    """Set the prefix lengths of the decodes in a mixed batch to their lengths - 1.

    Under overlap scheduling SGLang assumes that every such decode has a token in flight; one
    that skipped a step has none.
    """
    if not batch.forward_mode.is_mixed():
        return
    count = len(batch.decoding_reqs)
    if count:
        lens = (batch.seq_lens_cpu[-count:] - 1).tolist()
        batch.prefix_lens = [*batch.prefix_lens[:-count], *lens]
