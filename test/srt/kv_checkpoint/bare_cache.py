"""The checkpointing cache with its pools, but without a model: requests are computed by arithmetic.

The KV of a token is a number made of all tokens up to it, so whether a slot holds
the right KV can be checked at any time.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import torch

from sglang_coserve.core.kv_checkpoint import CheckpointPolicy
from sglang_coserve.srt import compat
from srt.kv_checkpoint.consistency import assert_consistent
from srt.kv_checkpoint.kv_pools import CacheEngine, KvShape
from srt.kv_rows import tokens_of

Req = Any

_LAYERS = 2


class BareEngine(CacheEngine):
    """Pools of ``slots`` tokens and of ``host_slots``, the cache, and requests."""

    def __init__(
        self,
        policy: CheckpointPolicy,
        *,
        slots: int,
        host_slots: int,
        page_tokens: int,
        context: int = 8192,
        requests: int = 128,
        heads: int = 1,
    ) -> None:
        shape = KvShape(_LAYERS, heads, 1, slots, page_tokens, requests, context, torch.float32)
        super().__init__(
            shape,
            policy,
            device="cpu",
            host_times=host_slots / slots,
        )
        self.slots, self.page_tokens = slots, page_tokens

    # --- Requests ----------------------------------------------------------------------------

    def admit(self, req: Req) -> bool:
        """Prefill a request behind what the cache has of it; False when there is no memory."""
        self.settle()
        if not self._rows.admit(req):
            return False
        self.copy_streams[1].synchronize()
        prefix, length, page = compat.computed_tokens(req), len(tokens_of(req)), self.page_tokens
        slots = self._allocate(-(-(length - prefix) // page) * page)
        assert slots is not None, "SGLang has counted the memory before"
        self._rows.extend(req, slots[: length - prefix])
        self._compute(req, prefix, length)
        self._rows.prefilled(req)
        req.output_ids.append(self._next_token(req))
        self.running.append(req)
        return True

    def decode(self, req: Req) -> bool:
        """Compute the KV of the last token and give the request another one."""
        place = len(tokens_of(req)) - 1
        if place % self.page_tokens:
            slots = self.table.req_to_token[compat.slot_of(req), place - 1 : place] + 1
        else:
            new = self._allocate(self.page_tokens)
            if new is None:
                return False
            slots = new[:1]
        self._rows.extend(req, slots)
        self._compute(req, place, place + 1)
        req.output_ids.append(self._next_token(req))
        return True

    def release(self, req: Req, *, ends: bool = False) -> None:
        """Give a request's KV to the cache; it has ended, or is to be resumed."""
        if ends:
            self._rows.end(req)
        else:
            self._rows.preempt(req)
        self.running.remove(req)

    # --- Checks --------------------------------------------------------------------------

    def assert_consistent(self) -> None:
        """Check that every slot has one owner, and that every running request has its own KV."""
        cache, page = self.cache, self.page_tokens
        own = sum(
            -(-(len(tokens_of(req)) - 1) // page) * page - compat.protected_tokens(req)
            for req in self.running
        )
        held = cache.evictable_size() + cache.protected_size() + own
        assert self.allocator.available_size() + held == self.slots // page * page
        assert_consistent(cache)
        for req in self.running:
            self.assert_right_kv(req)

    def assert_right_kv(self, req: Req) -> None:
        """Check the KV of all tokens of a request but the last, which has none yet."""
        length = len(tokens_of(req)) - 1
        slots = self.table.req_to_token[compat.slot_of(req), :length].long()
        expected = _kv_of(tokens_of(req)[:length], 0)
        for layer in range(_LAYERS):
            for buffer, sign in ((self.kv.k_buffer, 1), (self.kv.v_buffer, -1)):
                found = buffer[layer][slots, 0, 0]
                assert torch.equal(found, sign * (expected + layer)), f"{req.rid} has wrong KV"

    # --- Parts ---------------------------------------------------------------------------

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.cache, tokens)
        slots: torch.Tensor | None = self.allocator.alloc(tokens)
        return slots

    def _compute(self, req: Req, begin: int, end: int) -> None:
        slots = self.table.req_to_token[compat.slot_of(req), begin:end].long()
        values = _kv_of(tokens_of(req)[:end], begin)
        for layer in range(_LAYERS):
            self.kv.k_buffer[layer][slots, 0, 0] = values + layer
            self.kv.v_buffer[layer][slots, 0, 0] = -(values + layer)

    @staticmethod
    def _next_token(req: Req) -> int:
        return zlib.crc32(tokens_of(req).tobytes()) % 50


def _kv_of(tokens: array[int], begin: int) -> torch.Tensor:
    """Return the KV of the tokens from ``begin`` on: numbers that float32 holds exactly."""
    values, state = [], 0
    for place, token in enumerate(tokens):
        state = zlib.crc32(token.to_bytes(8, "little"), state)
        if place >= begin:
            values.append(float(state % 2**22))
    return torch.tensor(values)
