"""The checkpointing cache with its pools on a device, but without a model."""

from __future__ import annotations

import time
from itertools import count
from typing import Any, Final

import torch

from kv_bench.pools import CacheEngine, KvShape
from kv_bench.rows import new_request
from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu

__all__ = ["KvEngine"]

Req = Any

_LOAD_TIMEOUT_S: Final = 30.0
_HOST_TIMES: Final = 1.5
"""Host memory over the device's."""


class KvEngine(CacheEngine):
    """Requests that are admitted, grow, are saved and preempted. All tokens in whole pages.

    KV is random numbers: what matters is how long copies take, and that they are equal.
    """

    def __init__(self, shape: KvShape) -> None:
        super().__init__(
            shape,
            CheckpointPolicy(CheckpointMode.EAGER),
            device="cuda" if cpu.has_cuda() else "cpu",
            host_times=_HOST_TIMES,
        )
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.normal_()
        self._numbers = count(1)

    def admit(self, tokens: int) -> Req:
        """Add an offline request whose prompt has so many tokens and KV, and is its own."""
        number = next(self._numbers)
        req = new_request(f"offline-{number}", [number, *range(1, tokens)], offline=True)
        assert self._rows.admit(req), "the parts below fit into the pool"
        self._give(req, tokens)
        self._rows.prefilled(req)
        req.output_ids.append(number)
        self.running.append(req)
        return req

    def grow(self, req: Req, tokens: int) -> None:
        """Give a request the KV of so many more tokens."""
        self._give(req, tokens)
        req.output_ids.extend([1] * tokens)

    def checkpoint(self) -> int:
        """Begin the copies of a step; return their tokens."""
        requests = ((req, compat.computed_tokens(req)) for req in self.running)
        copied: int = self.cache.checkpoint_step(requests)
        return copied

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

    def device_kv(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the KV in some slots, of all layers: (2, layers, slots, heads, head size)."""
        stacks = ([b[slots] for b in buffers] for buffers in (self.kv.k_buffer, self.kv.v_buffer))
        return torch.stack([torch.stack(layers) for layers in stacks])

    def _give(self, req: Req, tokens: int) -> None:
        slots = self.allocator.alloc(tokens)
        assert slots is not None, "the parts below fit into the pool"
        self._rows.extend(req, slots)
