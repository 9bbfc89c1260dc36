"""Copies from the device to host memory in flight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheOperation
from sglang.srt.mem_cache.unified_radix_cache import _OngoingWriteThrough

from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import can_save, host_slots
from sglang_coserve.srt.kv_checkpoint.request_checkpoint import RequestCheckpoint

_POLL_S = 0.0002


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
        return bool(step - oldest_step > self._cache.policy.stall_steps)

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
        """Begin an asynchronous copy of slots, ordered after all work submitted to the device."""
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
        controller.start_writing()

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
        deadline_s = time.monotonic() + timeout_s
        is_done = True
        while acks and not acks[-1].finish_event.query():
            if time.monotonic() > deadline_s:
                is_done = False
                break
            time.sleep(_POLL_S)
        if cache.tp_world_size > 1:
            answer = torch.tensor(int(is_done))
            cache._all_reduce(answer, torch.distributed.ReduceOp.MIN)
            is_done = bool(answer.item())
        if is_done:
            cache.writing_check(finish_count=len(acks))
        else:
            self._num_waited_for = self._num_begun
        return is_done
