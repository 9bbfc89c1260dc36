"""SGLang's hierarchical radix cache with checkpoints of running offline rows.

Running rows are saved beside the tree, in a host table of their own: a tree node for
every saved page would make each insertion slower. When a row is released its KV
goes to the tree as usual, and its saved pages become the nodes' host pages, so that
device slots can be reclaimed at once.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.mem_cache.evict_policy import PriorityStrategy
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_coserve.core.kv_checkpoint import (
    CheckpointPolicy,
    CheckpointSnapshot,
    HostQuota,
    PageCopy,
    RowToSave,
    is_stuck,
    plan_copies,
)
from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.kv_checkpoint.copy_jobs import CopyJobs, NodeCopy, Piece, RowCopy
from sglang_coserve.srt.kv_checkpoint.host_space import HostSpace
from sglang_coserve.srt.kv_checkpoint.prefetch import Prefetch, Prefetches
from sglang_coserve.srt.kv_checkpoint.reclaim import Reclaimer
from sglang_coserve.srt.kv_checkpoint.row_checkpoint import RowCheckpoint, slots_of_runs
from sglang_coserve.srt.kv_checkpoint.tree_nodes import (
    EVICTION_RANK,
    bind_host,
    can_save,
    subtree,
    unsaved_path,
)
from sglang_coserve.srt.request_marks import is_offline

__all__ = ["CheckpointCache"]

Node = Any
Req = Any


class CheckpointCache(HiRadixCache):
    """See the module's docstring. Everything runs in the scheduler's thread.

    Args:
        params: SGLang's.
        server_args: SGLang's.
        policy: what is copied when.
        host_shares: part of the host pool of each class; together at most 1.
    """

    def __init__(
        self,
        params: Any,
        server_args: Any,
        policy: CheckpointPolicy,
        host_shares: dict[RequestClass, float],
    ) -> None:
        self.policy = policy
        self._host_shares = host_shares
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.step = 0
        self._inserting = RequestClass.ONLINE
        super().__init__(params, server_args)
        self.eviction_strategy = PriorityStrategy()

    def reset(self) -> None:
        """Forget all KV; nothing may be under way."""
        super().reset()
        pool, page = self.token_to_kv_pool_host, self.page_size
        limits = {
            request_class: int(pool.logical_size * share) // page * page
            for request_class, share in self._host_shares.items()
        }
        self._rows: dict[str, RowCheckpoint] = {}
        self._waiting: dict[str, list[Node]] = {}
        self.space = HostSpace(
            pool, HostQuota(limits[RequestClass.ONLINE], limits[RequestClass.OFFLINE]), self.counts
        )
        self.copies = CopyJobs(self, self.space)
        self._reclaimer = Reclaimer(self, self.policy, self.space, self.copies, self.counts)
        self.prefetches = Prefetches(self, self._reclaimer, self.counts)

    # --- Checkpoints ---------------------------------------------------------------------

    def checkpoint_step(self, progress: Iterable[tuple[Req, int]]) -> int:
        """Begin this iteration's copies; return their tokens.

        ``progress`` names the offline rows that the iteration has computed, each with
        the length of its KV. To be called once after the results of each batch.
        """
        self.step += 1
        for req, tokens in progress:
            self._note(req, tokens)
        rows = [
            RowToSave(rid, dirty_tokens)
            for rid, row in self._rows.items()
            if (dirty_tokens := row.dirty_tokens + _num_tokens(self._unsaved_prefix(row)))
        ]
        if not rows:
            return 0
        if not self.space.may_try(RequestClass.OFFLINE, self.step):
            self.counts["backed_off_steps"] += 1
            return 0
        if self.is_stuck():
            self.counts["stalled_steps"] += 1
            return 0
        plan = plan_copies(self.policy, self._snapshot(rows), self.page_size)
        return self._carry_out(plan) if plan else 0

    def _note(self, req: Req, tokens: int) -> None:
        row = self._rows.get(req.rid)
        # The prefix of a row that prefills in chunks grows.
        if row is None or row.req is not req or row.start_tokens != req.cache_protected_len:
            if row is not None:
                self._discard(row)
            self.forget(req.rid)
            row = self._rows[req.rid] = RowCheckpoint(req, self.page_size)
        if tokens >= len(req.origin_input_ids) + len(req.output_ids) - 1:
            row.computed(tokens)

    def _unsaved_prefix(self, row: RowCheckpoint) -> list[Node]:
        """Return the nodes of a row's prefix that are neither saved nor being copied."""
        node = row.req.last_node
        if node.host_value is not None:  # The root's is empty.
            return []
        path = unsaved_path(node, self.root_node)
        return [node for node in path if not self.copies.is_copying(node)]

    def _snapshot(self, rows: Sequence[RowToSave] = ()) -> CheckpointSnapshot:
        allocator = self.token_to_kv_pool_allocator
        unused = allocator.available_size() + self.evictable_size()
        oldest = self.copies.oldest_step
        return CheckpointSnapshot(
            rows,
            used_share=1 - unused / allocator.size,
            in_flight_tokens=self.copies.in_flight_tokens,
            oldest_copy_steps=0 if oldest is None else self.step - oldest,
        )

    def is_stuck(self) -> bool:
        """Return whether the copy engine no longer answers."""
        return is_stuck(self.policy, self._snapshot())

    def _carry_out(self, plan: Sequence[PageCopy]) -> int:
        """Begin the copies of a plan, each behind that of its row's prefix; return the tokens."""
        targets: dict[int, tuple[Node | RowCheckpoint, int]] = {}
        for rid, tokens in plan:
            row = self._rows[rid]
            left = tokens
            for node in self._unsaved_prefix(row):
                targets[id(node)] = (node, len(node.key))
                left -= len(node.key)
            if left > 0 and row.pages.dirty:
                targets[id(row)] = (row, min(left, row.dirty_tokens))
        return self._copy(list(targets.values()), RequestClass.OFFLINE)

    def _copy(
        self, targets: Sequence[tuple[Node | RowCheckpoint, int]], request_class: RequestClass
    ) -> int:
        """Begin one copy of as many of the first targets as host memory holds; return its tokens.

        A node comes behind its parent, a row behind its prefix.
        """
        sizes = [tokens for _, tokens in targets]
        limit = self.space.limit_tokens(request_class)
        self._reclaimer.reclaim_host(request_class, min(sum(sizes), limit))
        totals = list(accumulate(sizes))
        # At least one: that it is refused is noted.
        fitting = max(bisect_right(totals, self.space.free_tokens(request_class)), 1)
        host_slots = self.space.alloc(request_class, totals[fitting - 1], self.step)
        if host_slots is None:
            return 0
        pieces: list[Piece] = []
        device_slots: list[torch.Tensor] = []
        runs: list[tuple[int, int, int]] = []
        # Nodes first: the slots of all rows are looked up at once.
        fitting_targets = sorted(
            targets[:fitting], key=lambda target: isinstance(target[0], RowCheckpoint)
        )
        parts = torch.split(host_slots, [tokens for _, tokens in fitting_targets])
        for (target, tokens), part in zip(fitting_targets, parts, strict=True):
            if isinstance(target, RowCheckpoint):
                runs.append((target.req.req_pool_idx, target.begin_copy(tokens, part), tokens))
                pieces.append(RowCopy(target, tokens, part))
            else:
                device_slots.append(target.value)
                pieces.append(NodeCopy([target], part, request_class))
        if runs:
            device_slots.append(slots_of_runs(self.req_to_token_pool.req_to_token, runs))
        self.copies.begin(pieces, torch.cat(device_slots), host_slots, self.step)
        self.counts["checkpointed_tokens"] += totals[fitting - 1]
        return totals[fitting - 1]

    def _inc_hit_count(self, node: Node, chunked: bool = False) -> None:
        """Save a prefix of online requests as SGLang would, within the quota of the class."""
        if chunked:
            return
        node.hit_count += 1
        online = RequestClass.ONLINE
        if self._inserting is not online or not self.space.may_try(online, self.step):
            return
        is_new = can_save(node, self.root_node) and not self.copies.is_copying(node)
        if is_new and not self.is_stuck():
            self._copy([(node, len(node.key))], online)

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        """Take note of the copies that have ended, on all ranks alike."""
        super().writing_check(write_back, finish_count)
        self.copies.settle()

    # --- Rows end or give way ------------------------------------------------------------

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        """Insert what a prefill has computed."""
        with self._inserting_for(req):
            super().cache_unfinished_req(req, chunked)

    def cache_finished_req(
        self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """Insert the KV of a row that has ended or gives way; of the latter, keep what is saved."""
        begin_s = time.perf_counter()
        with self._inserting_for(req):
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        row = self._rows.pop(req.rid, None)
        if req.finished():
            self.forget(req.rid)
        if row is None:
            return
        if is_insert and not req.finished():
            self._adopt(row, kv_len_to_handle)
        else:
            self._discard(row)
        self.counts["releases"] += 1
        self.seconds["release"] += time.perf_counter() - begin_s

    def forget(self, rid: str) -> None:
        """Let the host pages of a request that no longer waits be taken for others."""
        for node in self._waiting.pop(rid, ()):
            node.release_host()

    def _adopt(self, row: RowCheckpoint, kv_tokens: int) -> None:
        """Make a row's saved pages the host pages of the nodes that now hold its KV. No copy."""
        req, start = row.req, row.start_tokens
        kv_end = kv_tokens // self.page_size * self.page_size
        end = min(row.saved_end_tokens, kv_end)
        host_slots = row.release()
        last_saved = self._node_at(req, end) if end > start else req.last_node
        unused = [host_slots[max(end - start, 0) :]]
        for node, first in _between(last_saved, start, end):
            slots = host_slots[first - start : first - start + len(node.key)]
            if can_save(node, self.root_node):
                bind_host(node, slots, RequestClass.OFFLINE)
                self.counts["adopted_tokens"] += len(slots)
            else:
                unused.append(slots)
        self.space.free(RequestClass.OFFLINE, torch.cat(unused))
        self.forget(req.rid)
        last = self._node_at(req, kv_end)
        kept = {id(node): node for node in (last_saved, last) if node is not self.root_node}
        self._waiting[req.rid] = list(kept.values())
        for node in kept.values():
            node.protect_host()

    def _node_at(self, req: Req, tokens: int) -> Node:
        """Return the node with which the request's first ``tokens`` tokens end, made if need be."""
        if not tokens:
            return self.root_node
        key = RadixKey((req.origin_input_ids + req.output_ids)[:tokens], req.extra_key)
        return self._match_prefix_helper(self.root_node, key)[1]

    def _discard(self, row: RowCheckpoint) -> None:
        self.space.free(RequestClass.OFFLINE, row.release())

    def insert(self, params: Any) -> Any:
        """Insert for the class of the request at hand: it ranks the nodes for eviction."""
        return super().insert(replace(params, priority=EVICTION_RANK[self._inserting]))

    @contextmanager
    def _inserting_for(self, req: Req) -> Iterator[None]:
        self._inserting = RequestClass.OFFLINE if is_offline(req) else RequestClass.ONLINE
        try:
            yield
        finally:
            self._inserting = RequestClass.ONLINE

    # --- Memory --------------------------------------------------------------------------

    def _evict_write_through(self, num_tokens: int) -> int:
        begin_s = time.perf_counter()
        freed = self._reclaimer.reclaim(num_tokens)
        self.counts["reclaims"] += 1
        self.seconds["reclaim"] += time.perf_counter() - begin_s
        return freed

    def evict_host(self, num_tokens: int) -> None:
        """Refuse: host memory is reclaimed within the quota of a class only."""
        raise AssertionError(f"{num_tokens} tokens asked for by SGLang's own copies or storage")

    def _split_node(self, key: RadixKey, child: Node, split_len: int) -> Node:
        head = super()._split_node(key, child, split_len)
        self.copies.split(child, head)
        if child.host_value is not None:
            head.host_holder = child.host_holder
        return head

    def protected_size(self) -> int:
        """Count slots that a load is about to fill: they are neither free nor evictable."""
        return int(super().protected_size()) + self.prefetches.in_flight_tokens

    # --- Resume --------------------------------------------------------------------------

    def prefetch_step(self, req: Req, budget_tokens: int) -> tuple[Prefetch, int]:
        """Begin the next load of a waiting request; see ``Prefetches.step``."""
        req.init_next_round_input(self)
        return self.prefetches.step(req, budget_tokens)

    def loading_check(self, finish_count: int | None = None) -> None:
        """Take note of the loads that have ended, on all ranks alike."""
        super().loading_check(finish_count)
        self.prefetches.settle()

    def assert_consistent(self) -> None:
        """Check that every host slot that is taken has exactly one owner; O(tree). For tests."""
        self.space.assert_consistent()
        slots = [node.host_value for node in subtree(self.root_node)[1:] if node.backuped]
        slots += [slots for row in self._rows.values() for slots in row.host_slots]
        slots += self.copies.orphans()
        taken = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
        assert len(taken.unique()) == len(taken), "a host slot has two owners"
        used = sum(self.space.used_tokens(request_class) for request_class in RequestClass)
        assert len(taken) == used, f"{used - len(taken)} host slots have no owner"


def _num_tokens(nodes: Iterable[Node]) -> int:
    return sum(len(node.key) for node in nodes)


def _between(node: Node, start_tokens: int, end_tokens: int) -> list[tuple[Node, int]]:
    """Return the nodes of the path to ``node`` from token ``start`` to ``end``, each with where
    it begins, top first."""
    nodes = []
    while end_tokens > start_tokens:
        end_tokens -= len(node.key)
        nodes.append((node, end_tokens))
        node = node.parent
    nodes.reverse()
    assert end_tokens >= start_tokens or not nodes, "a node holds the end of a prefix and more"
    return nodes
