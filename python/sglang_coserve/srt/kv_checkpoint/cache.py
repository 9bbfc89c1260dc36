"""SGLang's unified radix cache with checkpoints of running offline requests.

Host pages of running requests are kept outside of the tree, in a separate table: a tree node for
every saved page would make each insertion slower. When a request is released, its KV
goes to the tree as usual, and its saved pages become the host pages of the nodes, so that
device slots can be reclaimed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.checkpoint_copies import CheckpointWriter, CopyJobs
from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import (
    EVICTION_RANK,
    TREE_BACKEND,
    EvictionOrder,
    can_save,
    host_slots,
    path_to,
)
from sglang_coserve.srt.kv_checkpoint.reclaim import Prefetches, Reclaimer
from sglang_coserve.srt.kv_checkpoint.request_checkpoint import HostSpace, RequestCheckpoint
from sglang_coserve.srt.kv_checkpoint.strategies import Strategy
from sglang_coserve.srt.marks.request_marks import is_offline

Node = Any
Req = Any


@compat.inserting_cache
class CheckpointCache(UnifiedRadixCache):
    """A radix cache with checkpoints of offline KV; runs in the scheduler's thread."""

    def __init__(self, params: Any, server_args: Any, strategy: Strategy) -> None:
        self.strategy = strategy
        self.counts: Counter[str] = Counter()
        self.waited: Callable[[float], None] = lambda _seconds: None
        """Told of each wait for copies, in seconds."""

        self.step = 0
        self._inserting = RequestClass.ONLINE
        params.tree_components = (BASE_COMPONENT_TYPE,)
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(TREE_BACKEND):
            super().__init__(params)
        self.init_hicache(server_args, params)
        self._start_over()

    def reset(self) -> None:
        """Discard all KV; no copy or load may be in flight."""
        super().reset()
        if self.cache_controller is not None:  # None while SGLang constructs the cache.
            self._start_over()

    def _start_over(self) -> None:
        self.space = HostSpace(self.host_pool, self.counts)
        self.copies = CopyJobs(self)
        self.reclaimer = Reclaimer(self)
        self.prefetches = Prefetches(self)
        self._saver = CheckpointWriter(self)
        self._pinned: dict[str, list[Node]] = {}
        """The last nodes of the KV of waiting requests, which protect their host pages."""

        self._expected: dict[str, torch.Tensor] = {}
        self._order = EvictionOrder(self.copies.is_copying)
        self.tree_core.eviction_strategy = self._order
        self.tree_core.on_split = self.copies.split

    @property
    def host_pool(self) -> Any:
        """SGLang's pool of host slots."""
        return self.host_pool_group.anchor_entry.host_pool

    # --- Checkpoints ---------------------------------------------------------------------

    def checkpoint_step(self, progress: Iterable[tuple[Req, int]]) -> int:
        """Begin the copies of this step; return the number of their tokens.

        ``progress`` has the offline requests computed in this step, each with
        the length of its KV. To be called once after the results of each batch.
        """
        self.step += 1
        for req, tokens in progress:
            self._saver.note(req, tokens)
        return self._saver.save(self.step)

    def _execute_and_commit_kv_backup(self, action: Any, **_options: Any) -> int:
        """Return 0, the tokens backed up: SGLang's own copies are off."""
        del action
        return 0

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        """Process the copies that have ended, at the same point on all ranks."""
        super().writing_check(write_back, finish_count)
        self.copies.settle()

    # --- Requests end or are retracted -------------------------------------------------------

    @contextmanager
    def inserting(self, req: Req) -> Iterator[None]:
        """Mark nodes inserted in this context as used by the class of ``req``."""
        self._inserting = RequestClass.OFFLINE if is_offline(req) else RequestClass.ONLINE
        try:
            yield
        finally:
            self._inserting = RequestClass.ONLINE

    def released(self, req: Req, kept_tokens: int | None) -> None:
        """Hand the saved pages of a retracted request over to the tree; free those of others.

        ``kept_tokens`` is the number of the request's tokens that were inserted into the tree; None
        if none were.
        """
        checkpoint = self._saver.checkpoints.get(req.rid)
        if checkpoint is not None and kept_tokens is not None and not req.finished():
            del self._saver.checkpoints[req.rid]
            end = self._adopt(checkpoint, kept_tokens)
            self._saver.save_released(req.rid, end, self.step)
        self._saver.discard(req.rid)
        if req.finished():
            self.forget(req.rid)

    def copy_to_host(self, req: Req) -> None:
        """Begin to copy what is not on the host yet of a request that was released."""
        self._saver.save_path(self._pinned_path(req.rid), self.step)

    def saved_slots(self, req: Req) -> torch.Tensor | None:
        """Return the host slots of a released request's first tokens, as many as are on the host.

        Without the page of its last token, whose KV may have been computed just then: under overlap
        scheduling a copy does not wait for that. None while some are being copied.
        """
        computed = len(req.origin_input_ids) + len(req.output_ids) - 1
        path = self._pinned_path(req.rid)
        if any(map(self.copies.is_copying, path)):
            return None
        saved = takewhile(lambda slots: slots is not None, map(host_slots, path))
        slots = torch.cat([torch.empty(0, dtype=torch.int64), *saved])
        return slots[: computed // self.page_size * self.page_size]

    def insert(self, params: Any) -> Any:
        """Insert with the eviction rank of the current request's class."""
        return super().insert(replace(params, priority=EVICTION_RANK[self._inserting]))

    # --- KV that comes from another engine ---------------------------------------------------

    def expect(self, rid: str, tokens: int) -> torch.Tensor | None:
        """Return host slots for the KV of a request's first tokens; None if there is no room.

        They belong to nobody until ``arrived``.
        """
        self.reclaimer.reclaim_host(min(tokens, self.space.limit_tokens))
        if tokens > self.space.free_tokens:
            return None
        slots = self.space.alloc(tokens, self.step)
        if slots is not None:
            self._expected[rid] = slots
        return slots

    def arrived(self, req: Req, *, has_kv: bool) -> None:
        """Make the slots that a request expected KV in the host pages of nodes, or free them.

        What others have put there meanwhile stays. The request waits for admission.
        """
        slots, root = self._expected.pop(req.rid), self.root_node
        if not has_kv:
            self.space.free(slots)
            return
        last = self._node_at(req, len(slots))
        known = sum(len(node.key) for node in path_to(last, root))
        unused, rest = self._bind(last, slots[:known]), slots[known:]
        if len(rest) and (last is root or host_slots(last) is not None):
            key = compat.radix_key(req, len(slots))[known:]
            last = self.tree_core.add_on_host(last, key, rest)
            rest = rest[:0]
        self.space.free(torch.cat([unused, rest]))
        self._pin(req.rid, (last, last))

    def rank_of_ranks(self) -> tuple[int, int]:
        """Return which rank this is, and of how many that share out the heads of the same KV."""
        if self.tp_world_size == 1:
            return 0, 1
        return torch.distributed.get_rank(group=self.tp_group), int(self.tp_world_size)

    def least_of_ranks(self, values: Sequence[int]) -> list[int]:
        """Return the least value of all ranks at each place; all must call it with as many."""
        least = torch.tensor(values, dtype=torch.int64)
        self._all_reduce(least, torch.distributed.ReduceOp.MIN)
        numbers: list[int] = least.tolist()
        return numbers

    # --- Host pages of waiting requests ----------------------------------------------------

    def _adopt(self, checkpoint: RequestCheckpoint, kv_tokens: int) -> Node:
        """Make a request's saved pages the host pages of the nodes that now hold its KV. No copy.

        The first ``kv_tokens`` tokens of its request are in the tree; returns the last of their
        nodes.
        """
        req, start, page = checkpoint.req, checkpoint.start_tokens, self.page_size
        kv_end = kv_tokens // page * page
        end = min(start + checkpoint.saved_tokens, kv_end)
        last_saved = self._node_at(req, end)
        unused = self._bind(last_saved, checkpoint.release(), start)
        self.counts["adopted_tokens"] += checkpoint.saved_tokens - len(unused)
        self.space.free(unused)
        last = self._node_at(req, kv_end)
        self._pin(req.rid, (last_saved, last))
        return last

    def _bind(self, last: Node, slots: torch.Tensor, start_tokens: int = 0) -> torch.Tensor:
        """Make slots with the KV of the tokens from ``start_tokens`` on the host pages of the nodes
        on the path to ``last``, as far as that goes; return those that are not used."""
        root, begin, unused = self.root_node, -start_tokens, []
        for node in path_to(last, root):
            end = begin + len(node.key)
            assert begin >= 0 or end <= 0, "a node holds the end of a prefix and more"
            here, begin = slots[max(begin, 0) : max(end, 0)], end
            if len(here) and can_save(node, root):
                self.tree_core.bind_host(node, here)
            else:
                unused.append(here)
        return torch.cat([*unused, slots[max(begin, 0) :]])

    def _pinned_path(self, rid: str) -> list[Node]:
        """Return the nodes of a waiting request's KV, from the root on; none if none are."""
        nodes = self._pinned.get(rid)
        return path_to(nodes[-1], self.root_node) if nodes else []

    def _pin(self, rid: str, ends: tuple[Node, Node]) -> None:
        """Protect the host pages of the paths that end at these nodes."""
        self.forget(rid)
        root = self.root_node
        nodes = {id(node): node for node in ends if node is not root}
        self._pinned[rid] = list(nodes.values())
        for node in nodes.values():
            self.tree_core.pin(node)

    def forget(self, rid: str) -> None:
        """Stop protecting the host pages of a request that no longer waits."""
        for node in self._pinned.pop(rid, ()):
            self.tree_core.unpin(node)

    def _node_at(self, req: Req, tokens: int) -> Node:
        """Return the node that ends at the request's first ``tokens`` tokens, split if needed."""
        if not tokens:
            return self.root_node
        key = compat.radix_key(req, tokens)
        match = self.match_prefix(MatchPrefixParams(key=key))
        return self.tree_core.node_by_id(match.best_match_node)

    # --- Memory --------------------------------------------------------------------------

    def _evict_components(
        self, request_by_type: Any, tracker: dict[Any, int], *_args: Any, **_kwargs: Any
    ) -> None:
        num_tokens = request_by_type[BASE_COMPONENT_TYPE]
        if num_tokens > 0:
            tracker[BASE_COMPONENT_TYPE] += self.reclaimer.reclaim(num_tokens)

    def protected_size(self) -> int:
        """Return the protected tokens, including slots that loads in flight will fill."""
        return int(super().protected_size()) + self.prefetches.in_flight_tokens

    # --- Resume --------------------------------------------------------------------------

    def prefetch_step(self, req: Req, budget_tokens: int) -> int | None:
        """Begin the next loads of a waiting request (see ``Prefetches.step``)."""
        req.init_next_round_input(self)
        return self.prefetches.step(req, budget_tokens)

    def need(self, req: Req) -> None:
        """Make the device KV of a waiting request the last to be evicted in this round."""
        self._order.needed.add(req.last_node)

    def begin_pass(self, now_s: float) -> None:
        """Begin a scheduling round: set the time (on the ranks' shared clock), clear ``need``."""
        self.prefetches.now_s = now_s
        self._order.needed.clear()

    def load_back(self, node_id: int, mem_quota: int | None = None, req: Req = None) -> bool:
        """Load KV within a batch, unless other loads are in flight.

        If those got stuck, the batch would wait for them forever.
        """
        if self.prefetches.in_flight_tokens:
            self.counts["refused_loads"] += 1
            return False
        return bool(super().load_back(node_id, mem_quota, req))

    def loading_check(self, finish_count: int | None = None) -> None:
        """Process the loads that have ended, at the same point on all ranks."""
        super().loading_check(finish_count)
        self.prefetches.settle()

    def sanity_check(self) -> None:
        """Check the tree as SGLang does when it is idle. O(tree)."""
        # Lazy copies save the end of a path before its beginning, like SGLang's write-back.
        self.is_write_back = self.strategy.saves_on_reclaim
        try:
            super().sanity_check()
        finally:
            self.is_write_back = False
