"""The checkpointing cache with its pools on a device, but without a model.

KV is random numbers: what matters is how long copies take, and that they are equal.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch

from kv_bench.rows import Rows, new_request, publish_settings
from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt import compat, cpu
from sglang_coserve.srt.kv_checkpoint.settings import server_settings

__all__ = ["KvEngine", "KvShape"]

Req = Any

_LOAD_TIMEOUT_S: Final = 30.0
_HOST_TIMES: Final = 1.5
"""Host memory over the device's."""


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

    @property
    def bytes_per_token(self) -> int:
        """In bf16."""
        return 2 * self.layers * self.heads * self.head_dim * 2


class KvEngine:
    """Rows that are admitted, grow, are checkpointed and give way. All tokens in whole pages."""

    def __init__(self, shape: KvShape) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache

        on_cpu = not cpu.has_cuda()
        self.device = "cpu" if on_cpu else "cuda"
        if on_cpu:
            from sglang_coserve.srt.kv_checkpoint.cpu import install_cpu_copies

            install_cpu_copies()
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as store:
                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{store.name}", rank=0, world_size=1
                )
        self.shape, device, dtype, page = shape, self.device, torch.bfloat16, shape.page_tokens
        self.kv = MHATokenToKVPool(
            *(shape.slots, page, dtype, shape.heads, shape.head_dim, shape.layers, device),
            enable_memory_saver=False,
        )
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.normal_()
        if page == 1:
            allocator = TokenToKVPoolAllocator(shape.slots, dtype, device, self.kv, need_sort=False)
        else:
            allocator = PagedTokenToKVPoolAllocator(
                shape.slots, page, dtype, device, self.kv, need_sort=False
            )
        self.allocator: Any = allocator
        self.table = ReqToTokenPool(shape.rows, shape.context, device, enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            tp_cache_group=torch.distributed.group.WORLD,
        )
        self.cache = CheckpointCache(
            params,
            publish_settings(**_settings(on_cpu=on_cpu), page_size=page),
            CheckpointPolicy(CheckpointMode.EAGER),
            {RequestClass.OFFLINE: 1.0, RequestClass.ONLINE: 0.0},
        )
        self.running: list[Req] = []
        self._rows = Rows(self.cache, self.allocator, self.table)
        self._numbers = count(1)

    def admit(self, tokens: int) -> Req:
        """Add an offline row whose prompt has so many tokens and KV; nobody else has its prefix."""
        number = next(self._numbers)
        req = new_request(f"row-{number}", [number, *range(1, tokens)], offline=True)
        assert self._rows.admit(req), "the parts below fit into the pool"
        self._give(req, tokens)
        self._rows.prefilled(req)
        req.output_ids.append(number)
        self.running.append(req)
        return req

    def grow(self, req: Req, tokens: int) -> None:
        """Give a row the KV of so many more tokens."""
        self._give(req, tokens)
        req.output_ids.extend([1] * tokens)

    def checkpoint(self) -> int:
        """Begin the copies of an iteration; return their tokens."""
        rows = ((req, compat.computed_tokens(req)) for req in self.running)
        copied: int = self.cache.checkpoint_step(rows)
        return copied

    def release(self, req: Req) -> None:
        """Let a row give way; it can be resumed."""
        self._rows.preempt(req)
        self.running.remove(req)

    def load(self, req: Req, budget_tokens: int) -> None:
        """Bring back what a preempted row has on the host, ``budget_tokens`` a pass."""
        deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        while True:
            self.cache.prefetch_step(req, budget_tokens)
            if not req.host_hit_length:
                return
            self.cache.check_hicache_events()
            assert time.monotonic() < deadline_s, "a load does not come back"

    def settle(self) -> None:
        """Wait for all copies and loads, and let their ends be seen."""
        for stream in compat.copy_streams(self.cache.cache_controller):
            stream.synchronize()
        self.cache.check_hicache_events()

    def clear(self) -> None:
        """Forget everything; the random numbers stay."""
        self.settle()
        for req in list(self.running):
            self.release(req)
        self.settle()
        self.cache.reset()
        self.allocator.clear()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def device_kv(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the KV in some slots, of all layers: (2, layers, slots, heads, head size)."""
        stacks = ([b[slots] for b in buffers] for buffers in (self.kv.k_buffer, self.kv.v_buffer))
        return torch.stack([torch.stack(layers) for layers in stacks])

    def _give(self, req: Req, tokens: int) -> None:
        slots = self.allocator.alloc(tokens)
        assert slots is not None, "the parts below fit into the pool"
        self._rows.extend(req, slots)


def _settings(*, on_cpu: bool) -> dict[str, Any]:
    """Return the fields of ``ServerArgs`` that the cache reads."""
    config = CoserveConfig.from_mapping({"kv_checkpoint": "eager"})
    defaults = {"hicache_mem_layout": "layer_first", "hicache_io_backend": "kernel"}
    return {**defaults, **server_settings(config, on_cpu=on_cpu), "hicache_ratio": _HOST_TIMES}
