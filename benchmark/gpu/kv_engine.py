"""The checkpointing cache with its pools on a device, but without a model."""

from __future__ import annotations

import time
from itertools import count
from typing import Any, Final

import torch

from gpu.kv_pools import CacheEngine, KvShape
from gpu.kv_rows import new_request
from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu

__all__ = ["KvEngine"]

Req = Any

_LOAD_TIMEOUT_S: Final = 30.0
_HOST_TIMES: Final = 1.5
"""Host memory over the device's."""


class KvEngine(CacheEngine):
    """Requests that are admitted, grow, are saved and preempted.

    KV is random numbers: what matters is how long copies take, and that they are equal.
    """

    def __init__(self, shape: KvShape, device: str | None = None) -> None:
        """``device``: a GPU where there is one, unless given."""
        policy = CheckpointPolicy(CheckpointMode.EAGER)
        device = device or ("cuda" if cpu.has_cuda() else "cpu")
        super().__init__(shape, policy, device=device, host_times=_HOST_TIMES)
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.normal_()
        self._numbers = count(1)

    def admit(self, tokens: int) -> Req:
        """Add an offline request whose prompt has so many tokens and KV, and is its own."""
        number = next(self._numbers)
        req = new_request(f"offline-{number}", [number, *range(1, tokens)], offline=True)
        assert self._rows.admit(req), "the parts fit into the pool"
        self._give(req, tokens)
        self._rows.prefilled(req)
        req.output_ids.append(number)
        self.running.append(req)
        return req

    def grow(self, req: Req, tokens: int) -> None:
        """Give a request the KV of so many more tokens."""
        self._give(req, tokens)
        req.output_ids.extend([1] * tokens)

    def release(self, req: Req) -> None:
        """Preempt a request; it can be resumed."""
        self._rows.preempt(req)
        self.running.remove(req)

    def load(self, req: Req, budget_tokens: int) -> None:
        """Bring back what a preempted request has on the host, ``budget_tokens`` a pass."""
        deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        while True:
            self.cache.prefetch_step(req, budget_tokens)
            if not req.host_hit_length:
                return
            self.cache.check_hicache_events()
            assert time.monotonic() < deadline_s, "a load does not come back"

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

    def slots(self, req: Req, tokens: int) -> torch.Tensor:
        """Return where the KV of a request's first tokens is."""
        return self.table.req_to_token[compat.slot_of(req), :tokens].long()

    def cached_slots(self, req: Req) -> torch.Tensor:
        """Match a request that waits with the cache; return where its KV is on the device."""
        req.init_next_round_input(self.cache)
        root_id = self.cache.root_node.id
        return self.cache.tree_core.collect_full_device_indices(req.last_node, root_id).long()

    def device_kv(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the KV in some slots, of all layers: (2, layers, slots, heads, head size)."""
        stacks = ([b[slots] for b in buffers] for buffers in (self.kv.k_buffer, self.kv.v_buffer))
        return torch.stack([torch.stack(layers) for layers in stacks])

    def _give(self, req: Req, tokens: int) -> None:
        computed, page = compat.computed_tokens(req), self.shape.page_tokens
        in_page = min(tokens, -computed % page)
        if in_page:
            last = self.slots(req, computed)[-1]
            self._rows.extend(req, last + torch.arange(1, in_page + 1, device=self.device))
        if more := tokens - in_page:
            slots = self.allocator.alloc(-(-more // page) * page)
            assert slots is not None, "the parts fit into the pool"
            self._rows.extend(req, slots[:more])
