"""The checkpointing cache with its pools, but without a model: rows are computed by arithmetic.

The KV of a token is a number made of all tokens up to it, so whether a slot holds
the right KV can be told at any time. One cache in a process.
"""

from __future__ import annotations

import tempfile
import zlib
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.kv_checkpoint import CheckpointPolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt import cpu
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.kv_checkpoint.settings import server_settings

__all__ = ["BareEngine", "BareRow"]

_LAYERS = 2


class BareRow:
    """What the cache reads of a request."""

    def __init__(self, rid: str, prompt: Sequence[int], *, offline: bool) -> None:
        marks = {"coserve_class": "offline"} if offline else None
        self.rid = rid
        self.sampling_params = SimpleNamespace(custom_params=marks)
        self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q")
        self.extra_key: str | None = None
        self.session = None
        self.has_ended = False
        self.clear()

    def clear(self) -> None:
        """Forget all KV."""
        self.req_pool_idx: int | None = None
        self.kv: object | None = None
        self.cache_protected_len = 0
        self.prefix_indices = torch.empty(0, dtype=torch.int64)
        self.last_node: Any = None
        self.best_match_node: Any = None
        self.host_hit_length = 0
        self.swa_uuid_for_lock: int | None = None
        self.skip_lock_node_ids: dict[Any, set[int]] = {}
        self.swa_prefix_lock_released = False
        self.mamba_pool_idx: int | None = None

    @property
    def tokens(self) -> array[int]:
        """Prompt and outputs."""
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        """Return whether it has ended."""
        return self.has_ended

    def get_fill_ids(self) -> array[int]:
        """Return the tokens that have KV once it is prefilled."""
        return self.tokens

    def init_next_round_input(self, tree: Any) -> None:
        """Match with the tree, all tokens but the last."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(self.tokens[:-1], None)))
        self.prefix_indices = match.device_indices
        self.last_node, self.best_match_node = match.last_device_node, match.best_match_node
        self.host_hit_length = match.host_hit_length
        self.cache_protected_len = len(match.device_indices)


class BareEngine:
    """Pools of ``slots`` tokens and of ``host_slots``, the cache, and rows."""

    def __init__(
        self,
        policy: CheckpointPolicy,
        *,
        slots: int,
        host_slots: int,
        page_tokens: int,
        online_share: float = 0.0,
        context: int = 8192,
        rows: int = 128,
        heads: int = 1,
    ) -> None:
        cpu.set_environment_defaults()
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache
        from sglang_coserve.srt.kv_checkpoint.cpu import install_cpu_copies

        install_cpu_copies()
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as store:
                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{store.name}", rank=0, world_size=1
                )
        self.slots, self.page_tokens = slots, page_tokens
        self.kv = MHATokenToKVPool(
            slots, page_tokens, torch.float32, heads, 1, _LAYERS, "cpu", enable_memory_saver=False
        )
        if page_tokens == 1:
            self.allocator = TokenToKVPoolAllocator(
                slots, torch.float32, "cpu", self.kv, need_sort=False
            )
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                slots, page_tokens, torch.float32, "cpu", self.kv, need_sort=False
            )
        self.table = ReqToTokenPool(rows, context, "cpu", enable_memory_saver=False)
        settings = server_settings(CoserveConfig(kv_checkpoint="eager"), on_cpu=True)
        server_args = SimpleNamespace(
            **{**settings, "hicache_size": 0, "hicache_ratio": host_slots / slots},
            hicache_storage_backend=None,
            hicache_storage_backend_extra_config=None,
            hicache_storage_prefetch_policy="best_effort",
            extra_metric_labels=None,
            served_model_name="none",
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_tokens,
            tp_cache_group=torch.distributed.group.WORLD,
        )
        shares = {RequestClass.OFFLINE: 1 - online_share, RequestClass.ONLINE: online_share}
        self.cache = CheckpointCache(params, server_args, policy, shares)
        self.hooks = KvCheckpointing(self.cache)
        self.running: list[BareRow] = []
        self._decode = ForwardMode.DECODE

    # --- Rows ----------------------------------------------------------------------------

    def admit(self, row: BareRow) -> bool:
        """Prefill a row behind what the cache has of it; False when there is no memory."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        cache = self.cache
        self.settle()
        row.init_next_round_input(cache)
        cache.inc_lock_ref(row.last_node)
        locked = row.last_node
        if row.host_hit_length:
            loaded, row.last_node = cache.init_load_back(
                InitLoadBackParams(row.best_match_node, row.host_hit_length, req=row)
            )
            row.prefix_indices = torch.cat([row.prefix_indices, loaded])
            row.cache_protected_len = len(row.prefix_indices)
            cache.inc_lock_ref(row.last_node)
            cache.dec_lock_ref(locked)
            cache.ready_to_load_host_cache()
            cache.cache_controller.load_stream.synchronize()
        prefix = len(row.prefix_indices)
        new = self._allocate(-(-(len(row.tokens) - prefix) // self.page_tokens) * self.page_tokens)
        if new is None:
            cache.dec_lock_ref(row.last_node)
            row.clear()
            return False
        row.kv = object()
        (row.req_pool_idx,) = (self.table.free_slots.pop(),)
        slots = torch.cat([row.prefix_indices, new])[: len(row.tokens)]
        self.table.req_to_token[row.req_pool_idx, : len(slots)] = slots.int()
        self._compute(row, prefix, len(row.tokens))
        cache.cache_unfinished_req(row)
        row.output_ids.append(self._next_token(row))
        self.running.append(row)
        return True

    def decode(self, row: BareRow) -> bool:
        """Compute the KV of the last token and give the row another one."""
        place = len(row.tokens) - 1
        index = row.req_pool_idx
        assert index is not None
        if place % self.page_tokens:
            slot = int(self.table.req_to_token[index, place - 1]) + 1
        else:
            new = self._allocate(self.page_tokens)
            if new is None:
                return False
            slot = int(new[0])
        self.table.req_to_token[index, place] = slot
        self._compute(row, place, place + 1)
        row.output_ids.append(self._next_token(row))
        return True

    def release(self, row: BareRow, *, ends: bool = False) -> None:
        """Give a row's KV to the cache; it has ended, or is to be resumed."""
        row.has_ended = ends
        self.cache.cache_finished_req(row, kv_len_to_handle=len(row.tokens) - 1)
        self.table.free(row)
        row.clear()
        self.running.remove(row)

    def evict(self, tokens: int) -> int:
        """Reclaim at least so many device slots, as far as there are any; return how many."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def checkpoint(self) -> None:
        """Begin the copies of this iteration, as a scheduler does."""
        self.hooks.processed(SimpleNamespace(reqs=self.running, forward_mode=self._decode))

    # --- Checks --------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all copies and loads, and let their ends be seen.

        Nothing looks for them without waiting: what follows must not hang on how fast they are.
        """
        self.cache.cache_controller.write_stream.synchronize()
        self.cache.cache_controller.load_stream.synchronize()
        self.cache.check_hicache_events()

    def assert_consistent(self) -> None:
        """Check that every slot has one owner, and that every running row has its own KV."""
        cache, page = self.cache, self.page_tokens
        own = sum(
            -(-(len(row.tokens) - 1) // page) * page - row.cache_protected_len
            for row in self.running
        )
        held = cache.evictable_size() + cache.protected_size() + own
        assert self.allocator.available_size() + held == self.slots // page * page
        cache.assert_consistent()
        for row in self.running:
            self.assert_right_kv(row)

    def assert_right_kv(self, row: BareRow) -> None:
        """Check the KV of all tokens of a row but the last, which has none yet."""
        length = len(row.tokens) - 1
        slots = self.table.req_to_token[row.req_pool_idx, :length].long()
        expected = _kv_of(row.tokens[:length], 0)
        for layer in range(_LAYERS):
            for buffer, sign in ((self.kv.k_buffer, 1), (self.kv.v_buffer, -1)):
                found = buffer[layer][slots, 0, 0]
                assert torch.equal(found, sign * (expected + layer)), f"{row.rid} has wrong KV"

    # --- Parts ---------------------------------------------------------------------------

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.cache, tokens)
        slots: torch.Tensor | None = self.allocator.alloc(tokens)
        return slots

    def _compute(self, row: BareRow, begin: int, end: int) -> None:
        slots = self.table.req_to_token[row.req_pool_idx, begin:end].long()
        values = _kv_of(row.tokens[:end], begin)
        for layer in range(_LAYERS):
            self.kv.k_buffer[layer][slots, 0, 0] = values + layer
            self.kv.v_buffer[layer][slots, 0, 0] = -(values + layer)

    @staticmethod
    def _next_token(row: BareRow) -> int:
        return zlib.crc32(row.tokens.tobytes()) % 50


def _kv_of(tokens: array[int], begin: int) -> torch.Tensor:
    """Return the KV of the tokens from ``begin`` on: numbers that float32 holds exactly."""
    values, state = [], 0
    for place, token in enumerate(tokens):
        state = zlib.crc32(token.to_bytes(8, "little"), state)
        if place >= begin:
            values.append(float(state % 2**22))
    return torch.tensor(values)
