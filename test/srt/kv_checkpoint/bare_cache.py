"""The checkpointing cache on SGLang's pools, without a model: requests are computed by arithmetic.

The KV of a token is a number made of all tokens up to it, so whether a slot holds
the right KV can be checked at any time.
"""

from __future__ import annotations

import tempfile
import zlib
from array import array
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.srt.kv_checkpoint.strategies import Strategy
from sglang_coserve.srt.optional_parts import KV_STORE
from srt.kv_checkpoint.consistency import assert_consistent

Req = Any

_LAYERS, _ROWS, _CONTEXT = 2, 128, 8192


def new_request(rid: str, prompt: Iterable[int], *, offline: bool) -> Req:
    """Return a request that waits."""
    from sglang.srt.managers.schedule_batch import Req as RequestOfSGLang
    from sglang.srt.sampling.sampling_params import SamplingParams

    marks = {"coserve_class": "offline"} if offline else None
    params = SamplingParams(max_new_tokens=0, custom_params=marks)
    return RequestOfSGLang(rid, "", array("q", prompt), params, vocab_size=1 << 31)


def tokens_of(req: Req) -> array[int]:
    """Return prompt and outputs."""
    return req.origin_input_ids + req.output_ids


class BareEngine:
    """Pools of ``slots`` tokens and of ``host_slots``, the cache on top of them, and requests.

    It admits requests as SGLang does, and takes their memory back as co-serving does.
    """

    def __init__(
        self, strategy: Strategy, *, slots: int, host_slots: int, page_tokens: int
    ) -> None:
        cpu.set_environment_defaults()
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.runtime_context import get_context

        from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache
        from sglang_coserve.srt.kv_checkpoint.cpu import install_cpu_copies

        install_cpu_copies()
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as store:
                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{store.name}", rank=0, world_size=1
                )
        dtype, device = torch.float32, "cpu"
        self.kv = kv = MHATokenToKVPool(
            *(slots, page_tokens, dtype, 1, 1, _LAYERS, device), enable_memory_saver=False
        )
        self.allocator: Any
        if page_tokens == 1:
            self.allocator = TokenToKVPoolAllocator(slots, dtype, device, kv, need_sort=False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                slots, page_tokens, dtype, device, kv, need_sort=False
            )
        self.table = ReqToTokenPool(_ROWS, _CONTEXT, device, enable_memory_saver=False)
        config = CoserveConfig(kv_checkpoint="eager")
        settings = KV_STORE.server_settings({}, config, on_cpu=True)
        settings |= {"hicache_ratio": host_slots / slots, "page_size": page_tokens}
        # SGLang's settings in this process, beside its defaults.
        server_args = get_context().override_server_args(**settings).install()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_tokens,
            tp_cache_group=torch.distributed.group.WORLD,
        )
        self.cache = CheckpointCache(params, server_args, strategy)
        # As for a scheduler's cache: here passes run on the stream of whoever runs them.
        compat.fence_copies(self.cache.cache_controller, torch.cpu.current_stream())
        self.slots, self.page_tokens = slots, page_tokens
        self.running: list[Req] = []
        self.store = KV_STORE.store(self.cache, lambda _seconds: None)
        self._decode = ForwardMode.DECODE

    # --- Requests ----------------------------------------------------------------------------

    def admit(self, req: Req) -> bool:
        """Prefill a request behind what the cache has of it; False when there is no memory."""
        from sglang.srt.mem_cache import common

        self.settle()
        if not self.give_row(req):
            return False
        self.copy_streams[1].synchronize()
        prefix, length, page = compat.computed_tokens(req), len(tokens_of(req)), self.page_tokens
        slots = self._allocate(-(-(length - prefix) // page) * page)
        assert slots is not None, "SGLang has counted the memory before"
        self.extend(req, slots[: length - prefix])
        self._compute(req, prefix, length)
        # The first of them since SGLang 0.5.22.
        give = getattr(common, "checkpoint_kv_cache", None) or common.maybe_cache_unfinished_req
        give(req, self.cache)
        req.output_ids.append(self._next_token(req))
        self.running.append(req)
        return True

    def give_row(self, req: Req) -> bool:
        """Match a request with the cache, begin to load what is on the host, and give it a row.

        False when there is no memory for its tokens. The row has the slots of the cached prefix.
        """
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.managers.schedule_policy import PrefillAdder

        cache, page = self.cache, self.page_tokens
        req.init_next_round_input(cache)
        new_tokens = len(tokens_of(req)) - compat.prefix_tokens(req)
        # SGLang keeps a page and a token free: here all of the memory is for the taking.
        kept = page + 1 - (-new_tokens % page)
        adder = PrefillAdder(
            *(page, cache, self.allocator, None, 1.0, len(tokens_of(req)), None),
            num_mixed_decode_tokens=-kept,
        )
        adder.add_one_req(req, False, None)
        if not adder.can_run_list:
            return False
        cache.ready_to_load_host_cache()
        assert self.table.alloc([req]) is not None, "there are more rows than the table has"
        if req.kv is None:  # With SGLang 0.5.17 only a request with a row has this record.
            req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
        root_id = cache.root_node.id
        self.extend(req, cache.tree_core.collect_full_device_indices(req.last_node, root_id))
        return True

    def extend(self, req: Req, slots: torch.Tensor) -> None:
        """Give a request the KV in ``slots``, behind what it has."""
        begin = compat.computed_tokens(req)
        end = begin + len(slots)
        self.table.req_to_token[compat.slot_of(req), begin:end] = slots.int()
        compat.set_computed_tokens(req, end)
        req.kv.kv_allocated_len = end

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
        self.extend(req, slots)
        self._compute(req, place, place + 1)
        req.output_ids.append(self._next_token(req))
        return True

    def release(self, req: Req, *, ends: bool = False) -> None:
        """Give a request's KV to the cache; it has ended, or is to be resumed."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        if ends:
            req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
            compat.release_kv(req, self.cache, keeps=True)
        else:
            compat.release_for_requeue(req, self.cache)
        self.running.remove(req)

    # --- Copies and memory -------------------------------------------------------------------

    @property
    def copy_streams(self) -> tuple[Any, Any]:
        """Return the streams of copies to the host and to the device."""
        return compat.copy_streams(self.cache.cache_controller)

    def checkpoint(self) -> None:
        """Begin the copies of a decode step, as a scheduler does."""
        batch = SimpleNamespace(reqs=self.running, forward_mode=self._decode)
        self.store.computed(batch)

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
            self._assert_right_kv(req)

    def _assert_right_kv(self, req: Req) -> None:
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
        return self.allocator.alloc(tokens)

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
