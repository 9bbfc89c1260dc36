"""What KV pools have left, asked of SGLang's own allocators and caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_coserve.srt.steps.kv_pools import KvPools

FULL, WINDOWS, WINDOW = 64, 24, 6


def cache_of(allocator: Any, page_size: int, *components: ComponentType) -> UnifiedRadixCache:
    return UnifiedRadixCache(
        CacheInitParams(
            disable=True,
            req_to_token_pool=ReqToTokenPool(4, FULL, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            sliding_window_size=WINDOW,
            tree_components=components,
        )
    )


def with_windows(page_size: int) -> tuple[Any, KvPools]:
    kv = SWAKVPool(
        size=FULL,
        size_swa=WINDOWS,
        page_size=page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=2,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    allocator = SWATokenToKVPoolAllocator(
        FULL, WINDOWS, page_size, torch.float32, "cpu", kv, need_sort=False
    )
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        tree_cache=cache_of(allocator, page_size, ComponentType.FULL, ComponentType.SWA),
        is_hybrid_swa=True,
        full_tokens_per_layer=FULL,
        swa_tokens_per_layer=WINDOWS,
        max_total_num_tokens=FULL,
        page_size=page_size,
    )
    return allocator, KvPools(scheduler)


def test_a_token_takes_a_slot_of_both_and_leaves_one() -> None:
    allocator, pools = with_windows(1)
    slots = allocator.alloc(20)
    assert (pools.free_tokens, pools.free_window_tokens) == (44, 4)
    assert pools.headroom_tokens == 4
    allocator.free_swa(slots[:14])
    assert (pools.free_tokens, pools.free_window_tokens) == (44, 18)
    allocator.free(slots[14:])
    assert (pools.free_tokens, pools.free_window_tokens) == (50, 24)


@pytest.mark.parametrize(("page_size", "window_tokens"), [(1, 7), (4, 12), (16, 8)])
def test_a_request_holds_the_pages_of_a_window_and_one_more(
    page_size: int, window_tokens: int
) -> None:
    """But no more than the pool has for one request: it could not run otherwise."""
    _, pools = with_windows(page_size)
    assert pools.window_tokens == window_tokens


def test_one_pool_has_no_window() -> None:
    allocator = TokenToKVPoolAllocator(FULL, torch.float32, "cpu", None, need_sort=False)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        tree_cache=cache_of(allocator, 1, ComponentType.FULL),
        is_hybrid_swa=False,
        max_total_num_tokens=FULL,
    )
    pools = KvPools(scheduler)
    allocator.alloc(10)
    assert (pools.free_tokens, pools.evictable_tokens, pools.headroom_tokens) == (54, 0, 54)
    assert (pools.window_tokens, pools.free_window_tokens) == (0, 0)
