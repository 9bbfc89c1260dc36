"""Copies of device KV to host memory: what is to be copied of requests and of their prefixes in the
tree, and what is in flight."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheOperation
from sglang.srt.mem_cache.unified_radix_cache import _OngoingWriteThrough

from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import (
    can_save,
    full,
    host_slots,
    unsaved_path,
)
from sglang_coserve.srt.kv_checkpoint.request_checkpoint import RequestCheckpoint, slots_of_runs

_POLL_S = 0.0002

_STALL_STEPS: Final = 256
"""A copy that takes longer than this many steps counts as stuck: no more copies are begun."""


class RequestCopy(NamedTuple):
    """A copy of tokens of a running request, after its prefix."""

    checkpoint: RequestCheckpoint
    host_slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """A copy of a tree node, which gets the host slots only when the copy is complete.

    Nothing is locked: if the node is reclaimed meanwhile, the copy is discarded.
    """

    nodes: list[Any]
    """The node; if it is split meanwhile, its parts from the top down."""

    host_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy of a node that is being reclaimed; its device slots are freed after the copy."""

    node: Any
    host_slots: torch.Tensor


Piece = RequestCopy | NodeCopy | PendingCopy


@dataclass(frozen=True, slots=True)
class _Job:
    pieces: Sequence[Piece]
    tokens: int
    begun_step: int


class CopyJobs:
    """Begins copies, and processes their completion, oldest first.

    Each job goes through SGLang's own queue of write acknowledgements, so all
    ranks see it end in the same step. SGLang also waits for it before it flushes its cache.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._jobs: dict[int, _Job] = {}
        self._num_begun = 0
        self._num_waited_for = 0
        self._copying: dict[int, NodeCopy] = {}
        self.in_flight_tokens = 0

    @property
    def is_late(self) -> bool:
        """True while a copy is in flight for which ``finish_all`` has timed out."""
        oldest = next(iter(self._jobs), None)
        return oldest is not None and -oldest <= self._num_waited_for

    def is_stuck(self, step: int) -> bool:
        """Return whether copying counts as stuck, by the age of the oldest copy."""
        oldest_step = next((job.begun_step for job in self._jobs.values()), step)
        return step - oldest_step > _STALL_STEPS

    def may_begin(self, step: int) -> bool:
        """Return whether a copy may be begun: no recent refusal of host memory, and not stuck."""
        return self._cache.space.may_try(step) and not self.is_stuck(step)

    def begin(
        self,
        pieces: Sequence[Piece],
        device_slots: torch.Tensor,
        host_slots: torch.Tensor,
        step: int,
    ) -> None:
        """Begin an asynchronous copy of slots, ordered after all work submitted to the device.

        After a pass in flight, too: it may be computing the last token of a retracted request.
        """
        cache, controller = self._cache, self._cache.cache_controller
        self._num_begun += 1
        # Negative, because the ids of SGLang's own copies are those of tree nodes.
        job_id = -self._num_begun
        self._jobs[job_id] = _Job(pieces, len(host_slots), step)
        self.in_flight_tokens += len(host_slots)
        for piece in pieces:
            if isinstance(piece, NodeCopy):
                self._copying.update((id(node), piece) for node in piece.nodes)
        # An entry for SGLang that locks and publishes nothing.
        cache.ongoing_write_through[job_id] = _OngoingWriteThrough(cache.root_node.id, None, [])
        controller.write_queue.append(CacheOperation(host_slots, device_slots, job_id))
        compat.start_writing(controller)

    def settle(self) -> None:
        """Process the copies that SGLang has seen end. O(copies)."""
        ongoing = self._cache.ongoing_write_through
        for job_id in [job_id for job_id in self._jobs if job_id not in ongoing]:
            job = self._jobs.pop(job_id)
            self.in_flight_tokens -= job.tokens
            for piece in job.pieces:
                self._end(piece)

    def is_copying(self, node: Any) -> bool:
        """Return whether a ``NodeCopy`` of a node is in flight."""
        return id(node) in self._copying

    def split(self, node: Any, head: Any) -> None:
        """Record that a node was split, and that ``head`` is its first part."""
        piece = self._copying.get(id(node))
        if piece is not None:
            piece.nodes.insert(piece.nodes.index(node), head)
            self._copying[id(head)] = piece

    def _end(self, piece: Piece) -> None:
        if isinstance(piece, RequestCopy):
            if piece.checkpoint.is_released:
                self._cache.space.free(torch.as_tensor(piece.host_slots))
            else:
                piece.checkpoint.end_copy(len(piece.host_slots))
        elif isinstance(piece, NodeCopy):
            self._end_node(piece)
        elif host_slots(piece.node) is None:  # The node was dropped after a timeout.
            self._cache.space.free(piece.host_slots)

    def _end_node(self, piece: NodeCopy) -> None:
        sizes = [len(node.key) for node in piece.nodes]
        for node, slots in zip(piece.nodes, torch.split(piece.host_slots, sizes), strict=True):
            del self._copying[id(node)]
            if can_save(node, self._cache.root_node):
                self._cache.tree_core.bind_host(node, slots)
            else:
                self._cache.space.free(slots)

    def finish_all(self, timeout_s: float) -> bool:
        """Wait for all copies in flight; return False if they do not end in time.

        The result is the same on all ranks.
        """
        cache = self._cache
        acks = cache.cache_controller.ack_write_queue
        began_s = time.perf_counter()
        deadline_s = time.monotonic() + timeout_s
        is_done = True
        while acks and not acks[-1].finish_event.query():
            if time.monotonic() > deadline_s:
                is_done = False
                break
            time.sleep(_POLL_S)
        if cache.tp_world_size > 1:
            is_done = bool(cache.least_of_ranks([is_done])[0])
        cache.waited(time.perf_counter() - began_s)
        if is_done:
            cache.writing_check(finish_count=len(acks))
        else:
            self._num_waited_for = self._num_begun
        return is_done


Node = Any
Req = Any
Target = tuple[Node | RequestCheckpoint, int]
"""A node or request to copy, and how many of its tokens."""


class CheckpointWriter:
    """Copies what the strategy says; keeps the checkpoints of running requests.

    It runs in every step, so all requests of a step share one copy operation.
    """

    def __init__(self, cache: Any) -> None:
        self.checkpoints: dict[str, RequestCheckpoint] = {}
        """By rid, in order of admission."""
        self._cache = cache

    # --- Requests ----------------------------------------------------------------------------

    def note(self, req: Req, tokens: int) -> None:
        """Record that the first ``tokens`` tokens of a request have KV."""
        checkpoint = self.checkpoints.get(req.rid)
        # The prefix of a request that prefills in chunks grows.
        start_tokens = compat.protected_tokens(req)
        if (
            checkpoint is None
            or checkpoint.req is not req
            or checkpoint.start_tokens != start_tokens
        ):
            self.discard(req.rid)
            self._cache.forget(req.rid)
            checkpoint = self.checkpoints[req.rid] = RequestCheckpoint(req, self._cache.page_size)
        checkpoint.computed(tokens)

    def discard(self, rid: str) -> None:
        """Free the host pages of a request, if it has a checkpoint."""
        checkpoint = self.checkpoints.pop(rid, None)
        if checkpoint is not None:
            self._cache.space.free(checkpoint.release())

    # --- What to copy --------------------------------------------------------------------

    def save(self, step: int) -> int:
        """Begin the copies of this step; return the number of their tokens."""
        unsaved = self._unsaved()
        if not unsaved:
            return 0
        if not self._cache.space.may_try(step):
            self._cache.counts["backed_off_steps"] += 1
            return 0
        if self._cache.copies.is_stuck(step):
            self._cache.counts["stalled_steps"] += 1
            return 0
        copies = self._to_copy(unsaved)
        return self._copy(self._targets(copies), step) if copies else 0

    def save_released(self, rid: str, end: Node, step: int) -> None:
        """Begin to copy the unsaved nodes, up to ``end``, of a request that is being retracted.

        For example the last chunk of an unfinished prompt.
        """
        if not self._cache.copies.may_begin(step):
            return
        targets: list[Target] = [(node, len(node.key)) for node in self._not_begun(end)]
        if self._to_copy({rid: sum(tokens for _, tokens in targets)}):
            self._copy(targets, step)

    def save_path(self, path: Sequence[Node], step: int) -> None:
        """Begin to copy what is not saved of a path from the root, whatever the strategy."""
        targets: list[Target] = [
            (node, len(node.key))
            for node in path
            if host_slots(node) is None and not self._cache.copies.is_copying(node)
        ]
        if targets and self._cache.copies.may_begin(step):
            self._copy(targets, step)

    def _to_copy(self, unsaved: Mapping[str, int]) -> dict[str, int]:
        cache = self._cache
        copies: dict[str, int] = cache.strategy.to_copy(
            unsaved, cache.page_size, cache.copies.in_flight_tokens
        )
        return copies

    def _unsaved(self) -> dict[str, int]:
        unsaved = {}
        for rid, checkpoint in self.checkpoints.items():
            tokens = checkpoint.dirty_tokens
            tokens += sum(len(node.key) for node in self._not_begun(self._prefix_end(checkpoint)))
            if tokens:
                unsaved[rid] = tokens
        return unsaved

    def _prefix_end(self, checkpoint: RequestCheckpoint) -> Node:
        return self._cache.tree_core.node_by_id(checkpoint.req.last_node)

    def _not_begun(self, end: Node) -> list[Node]:
        """Return the nodes of the path to ``end`` that are neither saved nor being copied."""
        path = unsaved_path(end, self._cache.root_node)
        return [node for node in path if not self._cache.copies.is_copying(node)]

    def _targets(self, copies: Mapping[str, int]) -> list[Target]:
        """Return the targets of copies; the nodes of a request's prefix come before the request."""
        targets: list[Target] = []
        begun: set[int] = set()
        for rid, tokens in copies.items():
            checkpoint, left = self.checkpoints[rid], tokens
            for node in self._not_begun(self._prefix_end(checkpoint)):
                left -= len(node.key)
                if node.id not in begun:
                    begun.add(node.id)
                    targets.append((node, len(node.key)))
            left = min(left, checkpoint.dirty_tokens)
            if left > 0:
                targets.append((checkpoint, left))
        return targets

    # --- Copies --------------------------------------------------------------------------

    def _copy(self, targets: Sequence[Target], step: int) -> int:
        """Begin to copy the first targets, as many as fit host memory; return their tokens.

        A node must come after its parent, a request after its prefix.
        """
        totals = list(accumulate(tokens for _, tokens in targets))
        self._cache.reclaimer.reclaim_host(min(totals[-1], self._cache.space.limit_tokens))
        free_tokens = self._cache.space.free_tokens
        # Try at least one, so that a refusal is recorded.
        while len(totals) > 1 and totals[-1] > free_tokens:
            totals.pop()
        host_slots = self._cache.space.alloc(totals[-1], step)
        if host_slots is None:
            return 0
        self._begin(targets[: len(totals)], host_slots, step)
        self._cache.counts["checkpointed_tokens"] += totals[-1]
        return totals[-1]

    def _begin(
        self,
        targets: Sequence[Target],
        host_slots: torch.Tensor,
        step: int,
    ) -> None:
        pieces: list[Piece] = []
        device_slots: list[torch.Tensor] = []
        # Nodes first, because the slots of all requests are looked up together.
        checkpoints = [target for target in targets if isinstance(target[0], RequestCheckpoint)]
        begin = 0
        for node, tokens in targets:
            if not isinstance(node, RequestCheckpoint):
                slots = host_slots[begin : begin + tokens]
                pieces.append(NodeCopy([node], slots))
                device_slots.append(full(node).value)
                begin += tokens
        if checkpoints:
            numbers, runs = host_slots.tolist(), []
            for checkpoint, tokens in checkpoints:
                piece = RequestCopy(checkpoint, numbers[begin : begin + tokens])
                runs.append(checkpoint.begin_copy(piece.host_slots))
                pieces.append(piece)
                begin += tokens
            table = self._cache.req_to_token_pool.req_to_token
            device_slots.append(slots_of_runs(table, runs))
        self._cache.copies.begin(pieces, torch.cat(device_slots), host_slots, step)
