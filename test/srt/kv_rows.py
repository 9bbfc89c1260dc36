"""Requests of SGLang's and their rows in its pools, without a model to compute them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from sglang_coserve.srt import compat

Req = Any


def publish_settings(**settings: Any) -> Any:
    """Let these be SGLang's settings in this process, beside its defaults; return them."""
    from sglang.srt.runtime_context import get_context

    return get_context().override_server_args(**settings).install()


def new_request(rid: str, prompt: Sequence[int], *, offline: bool) -> Req:
    """Return a request that waits."""
    from sglang.srt.managers.schedule_batch import Req as RequestOfSGLang
    from sglang.srt.sampling.sampling_params import SamplingParams

    marks = {"coserve_class": "offline"} if offline else None
    params = SamplingParams(max_new_tokens=0, custom_params=marks)
    return RequestOfSGLang(rid, "", array("q", prompt), params, vocab_size=1 << 31)


def tokens_of(req: Req) -> array[int]:
    """Return prompt and outputs."""
    tokens: array[int] = req.origin_input_ids + req.output_ids
    return tokens


class Rows:
    """Admits requests as SGLang does, and takes their memory back as co-serving does."""

    def __init__(self, cache: Any, allocator: Any, table: Any) -> None:
        self._cache = cache
        self._allocator = allocator
        self._table = table

    def admit(self, req: Req) -> bool:
        """Match a request with the cache, begin to load what is on the host, and give it a row.

        False when there is no memory for its tokens. The row has the slots of the cached prefix.
        """
        from sglang.srt.managers.schedule_policy import PrefillAdder

        cache, page = self._cache, self._cache.page_size
        req.init_next_round_input(cache)
        new_tokens = len(tokens_of(req)) - compat.prefix_tokens(req)
        # SGLang keeps a page and a token free: here all of the memory is for the taking.
        kept = page + 1 - (-new_tokens % page)
        adder = PrefillAdder(
            *(page, cache, self._allocator, None, 1.0, len(tokens_of(req)), None),
            num_mixed_decode_tokens=-kept,
        )
        adder.add_one_req(req, False, None)
        if not adder.can_run_list:
            return False
        cache.ready_to_load_host_cache()
        assert self._table.alloc([req]) is not None, "there are more rows than the table has"
        if req.kv is None:
            _give_record(req)
        root_id = cache.root_node.id
        prefix = cache.tree_core.collect_full_device_indices(req.last_node, root_id)
        self.extend(req, prefix)
        return True

    def extend(self, req: Req, slots: torch.Tensor) -> None:
        """Give a request the KV in ``slots``, behind what it has."""
        begin = compat.computed_tokens(req)
        end = begin + len(slots)
        self._table.req_to_token[compat.slot_of(req), begin:end] = slots.int()
        compat.set_computed_tokens(req, end)
        req.kv.kv_allocated_len = end

    def prefilled(self, req: Req) -> None:
        """Give the cache what a prefill has computed."""
        from sglang.srt.mem_cache import common

        # The first of them since SGLang 0.5.22.
        give = getattr(common, "checkpoint_kv_cache", None) or common.maybe_cache_unfinished_req
        give(req, self._cache)

    def preempt(self, req: Req) -> None:
        """Retract a request; it waits."""
        compat.release_for_requeue(req, self._cache)

    def end(self, req: Req) -> None:
        """Let a request be at its end."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        compat.release_kv(req, self._cache, keeps=True)


def _give_record(req: Req) -> None:
    """With SGLang 0.5.17 a request has a record of its KV only while it has a row."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
