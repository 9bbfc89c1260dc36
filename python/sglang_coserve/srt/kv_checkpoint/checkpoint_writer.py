"""Copies device KV to host memory: the requests of each step, and their prefixes in the tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from sglang_coserve.core.kv_checkpoint import PageCopy, RequestToSave, plan_copies
from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import full, host_slots, unsaved_path
from sglang_coserve.srt.kv_checkpoint.copy_jobs import NodeCopy, Piece, RequestCopy
from sglang_coserve.srt.kv_checkpoint.request_checkpoint import RequestCheckpoint, slots_of_runs

Node = Any
Req = Any
Target = tuple[Node | RequestCheckpoint, int]
"""A node or request to copy, and how many of its tokens."""


class CheckpointWriter:
    """Carries out the plans of ``core.kv_checkpoint``; keeps the checkpoints of running requests.

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
        plan = self._plan(unsaved)
        return self._copy(self._targets(plan), step) if plan else 0

    def save_released(self, rid: str, end: Node, step: int) -> None:
        """Begin to copy the unsaved nodes, up to ``end``, of a request that is being retracted.

        For example the last chunk of an unfinished prompt.
        """
        if not self._cache.copies.may_begin(step):
            return
        targets: list[Target] = [(node, len(node.key)) for node in self._not_begun(end)]
        unsaved = RequestToSave(rid, sum(tokens for _, tokens in targets))
        if self._plan([unsaved]):
            self._copy(targets, step)

    def save_path(self, path: Sequence[Node], step: int) -> None:
        """Begin to copy what is not saved of a path from the root, whatever the mode."""
        targets: list[Target] = [
            (node, len(node.key))
            for node in path
            if host_slots(node) is None and not self._cache.copies.is_copying(node)
        ]
        if targets and self._cache.copies.may_begin(step):
            self._copy(targets, step)

    def _plan(self, unsaved: Sequence[RequestToSave]) -> tuple[PageCopy, ...]:
        cache = self._cache
        allocator = cache.token_to_kv_pool_allocator
        unused = allocator.available_size() + cache.evictable_size()
        return plan_copies(
            self._cache.policy,
            unsaved,
            cache.page_size,
            used_share=1 - unused / allocator.size,
            in_flight_tokens=self._cache.copies.in_flight_tokens,
        )

    def _unsaved(self) -> list[RequestToSave]:
        unsaved = []
        for rid, checkpoint in self.checkpoints.items():
            tokens = checkpoint.dirty_tokens
            tokens += sum(len(node.key) for node in self._not_begun(self._prefix_end(checkpoint)))
            if tokens:
                unsaved.append(RequestToSave(rid, tokens))
        return unsaved

    def _prefix_end(self, checkpoint: RequestCheckpoint) -> Node:
        return self._cache.tree_core.node_by_id(checkpoint.req.last_node)

    def _not_begun(self, end: Node) -> list[Node]:
        """Return the nodes of the path to ``end`` that are neither saved nor being copied."""
        path = unsaved_path(end, self._cache.root_node)
        return [node for node in path if not self._cache.copies.is_copying(node)]

    def _targets(self, plan: Iterable[PageCopy]) -> list[Target]:
        """Return the targets of a plan; the nodes of a request's prefix come before the request."""
        targets: list[Target] = []
        begun: set[int] = set()
        for rid, tokens in plan:
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
