"""SGLang's KV pools with the checkpointing cache on top of them, without a model."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.kv_checkpoint import CheckpointPolicy
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.kv_checkpoint.settings import server_settings
from sglang_coserve.srt.marks.request_marks import is_offline
from srt.kv_rows import Rows, publish_settings

Req = Any


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV of one token, and how much there is."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    slots: int = 49152
    page_tokens: int = 1
    rows: int = 128
    context: int = 16384
    dtype: Any = torch.bfloat16

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return int(2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize)


class CacheEngine:
    """The pools, the cache on top of them, and the requests that hold KV. One in a process."""

    def __init__(
        self,
        shape: KvShape,
        policy: CheckpointPolicy,
        *,
        device: str,
        host_times: float,
    ) -> None:
        """``host_times``: how many times as large as the device's the host memory is."""
        self.shape, self.device = shape, device
        cpu.set_environment_defaults()
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache

        on_cpu = device == "cpu"
        if on_cpu:
            from sglang_coserve.srt.kv_checkpoint.cpu import install_cpu_copies

            install_cpu_copies()
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as store:
                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{store.name}", rank=0, world_size=1
                )
        slots, page, dtype = shape.slots, shape.page_tokens, shape.dtype
        kv = MHATokenToKVPool(
            *(slots, page, dtype, shape.heads, shape.head_dim, shape.layers, device),
            enable_memory_saver=False,
        )
        allocator: Any
        if page == 1:
            allocator = TokenToKVPoolAllocator(slots, dtype, device, kv, need_sort=False)
        else:
            allocator = PagedTokenToKVPoolAllocator(slots, page, dtype, device, kv, need_sort=False)
        table = ReqToTokenPool(shape.rows, shape.context, device, enable_memory_saver=False)
        settings = server_settings(CoserveConfig(kv_checkpoint="eager"), on_cpu=on_cpu)
        defaults = {"hicache_mem_layout": "layer_first", "hicache_io_backend": "kernel"}
        server_args = publish_settings(
            **{**defaults, **settings, "hicache_ratio": host_times, "page_size": page}
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=table,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            tp_cache_group=torch.distributed.group.WORLD,
        )
        self.kv, self.allocator, self.table = kv, allocator, table
        self.cache = CheckpointCache(params, server_args, policy)
        # As for a scheduler's cache: here passes run on the stream of whoever runs them.
        passes = torch.get_device_module(device).current_stream()
        self.cache.cache_controller.load_fence_stream = passes
        self.hooks = KvCheckpointing(self.cache)
        self.running: list[Req] = []
        self._decode = ForwardMode.DECODE
        self._rows = Rows(self.cache, allocator, table)

    @property
    def copy_streams(self) -> tuple[Any, Any]:
        """Return the streams of copies to the host and to the device."""
        return compat.copy_streams(self.cache.cache_controller)

    def checkpoint(self) -> int:
        """Begin the copies of a decode step, as a scheduler does; return their tokens."""
        before = self.cache.counts["checkpointed_tokens"]
        batch = SimpleNamespace(reqs=self.running, forward_mode=self._decode)
        self.hooks.processed(batch, list(map(is_offline, self.running)))
        return int(self.cache.counts["checkpointed_tokens"] - before)

    def evict(self, tokens: int) -> int:
        """Reclaim at least so many device slots, as far as there are any; return how many."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def settle(self) -> None:
        """Wait for all copies and loads, and let their ends be seen.

        Nothing looks for them without waiting: what follows must not hang on how fast they are.
        """
        for stream in self.copy_streams:
            stream.synchronize()
        self.cache.check_hicache_events()
