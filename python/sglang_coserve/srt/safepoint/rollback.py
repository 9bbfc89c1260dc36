"""Undoes the preparation of a batch whose step is dropped.

To prepare a batch, SGLang allocates KV, advances lengths and moves requests between its data
structures, all before the forward pass. The results of a dropped step do not count,
so each of these changes is reverted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import ForwardKind, num_decodes

__all__ = ["RolledBack", "give_up", "roll_back"]

Req = Any
ScheduleBatch = Any


@dataclass(frozen=True)
class RolledBack:
    """The requests to be requeued after a dropped step; its decodes are left in the batch."""

    released: tuple[Req, ...]
    """Requests whose KV and slot were released, and which must wait again: prefills without earlier
    chunks, or all requests (``give_up``)."""

    unfinished: Req | None
    """The prefill with earlier chunks, which it keeps."""


def roll_back(
    batch: ScheduleBatch, kind: ForwardKind, chunked_req: Req | None, relay: Any
) -> RolledBack:
    """Undo the preparation of ``batch``, and leave in it the requests that decode.

    Args:
        batch: the prepared batch.
        kind: its kind.
        chunked_req: the scheduler's prefill that this batch would not have finished.
        relay: SGLang's ``FutureMap``, which passes each request's last token to its next step.

    Afterwards the batch is a decode batch in the state before the step, or empty if it had no
    decodes.  Requests that have ended meanwhile have released their KV already.
    """
    count = num_decodes(batch, kind)
    num_prefills = len(batch.reqs) - count
    prefills = batch.reqs[:num_prefills]
    if count:
        _undo_decodes(batch, count, relay)
    unfinished = next((req for req in prefills if _has_chunks(req)), None)
    if unfinished is not None:
        _undo_chunk(batch, unfinished, is_last=unfinished is not chunked_req)
    released = tuple(req for req in prefills if compat.holds_kv(req) and req is not unfinished)
    for req in released:
        compat.release_uncomputed(req, batch.tree_cache)
    if kind is not ForwardKind.DECODE:
        _keep_decodes(batch, num_prefills)
    return RolledBack(released, unfinished)


def give_up(batch: ScheduleBatch) -> RolledBack:
    """Release all requests of ``batch``, for a model whose layers keep a state besides KV.

    Some layers have advanced their state already, which cannot be undone: the requests start again
    from what the radix cache has of them.
    """
    released = tuple(req for req in batch.reqs if compat.holds_kv(req))
    for req in released:
        compat.release_uncomputed(req, batch.tree_cache)
    batch.input_ids = None
    batch.filter_batch(keep_indices=[])
    batch.chunked_req = batch.decoding_reqs = None
    return RolledBack(released, None)


def _undo_decodes(batch: ScheduleBatch, count: int, relay: Any) -> None:
    """Undo ``prepare_for_decode`` for the last ``count`` requests, and for the lengths of all."""
    allocator = batch.token_to_kv_pool_allocator
    reqs: Sequence[Req] = batch.reqs[-count:]
    lengths = batch.seq_lens_cpu[-count:]
    took_slots = torch.tensor([compat.holds_kv(req) for req in reqs])
    if allocator.page_size > 1:
        # Only requests that opened a new page allocated one.
        took_slots &= (lengths - 1) % allocator.page_size == 0
    slots = batch.out_cache_loc[-count:]
    allocator.free(slots[took_slots.to(slots.device)])
    for req in reqs:
        if compat.holds_kv(req):
            compat.set_computed_tokens(req, compat.computed_tokens(req) - 1)
            req.kv.kv_allocated_len -= 1
            req.decode_batch_idx -= 1
    # Put the tokens back into the relay, from which the pass took them: in SGLang's CI it returns
    # each only once.
    tokens = batch.input_ids[-count:]
    relay.stash(batch.req_pool_indices[-count:], RelayPayload(bonus_tokens=tokens))
    batch.seq_lens = batch.seq_lens - 1
    batch.seq_lens_cpu = batch.seq_lens_cpu - 1
    batch.orig_seq_lens = batch.orig_seq_lens - 1
    batch.seq_lens_sum = None
    batch.out_cache_loc = None
    batch.input_ids = None


def _has_chunks(req: Req) -> bool:
    """Return whether a prefill has run before, and so has more KV than its cached prefix."""
    return compat.holds_kv(req) and req.extend_batch_idx > 1


def _undo_chunk(batch: ScheduleBatch, req: Req, *, is_last: bool) -> None:
    """Undo ``prepare_for_extend`` for a prefill that keeps its earlier chunks."""
    allocator = batch.token_to_kv_pool_allocator
    page = allocator.page_size
    computed = compat.prefix_tokens(req)
    # KV after the prefix in its open page is overwritten by the next chunk.
    first_page = -(-computed // page) * page
    slots = batch.req_to_token_pool.req_to_token[
        compat.slot_of(req), first_page : req.kv.kv_allocated_len
    ]
    allocator.free_segment(slots, start_pos=first_page)
    req.kv.kv_allocated_len = computed
    compat.set_computed_tokens(req, computed)
    req.extend_batch_idx -= 1
    if not is_last:
        req.inflight_middle_chunks -= 1
    # An empty range: there is no new KV to insert into the prefix cache.
    compat.set_extent(req, computed, computed)
    req.already_computed = computed


def _keep_decodes(batch: ScheduleBatch, num_prefills: int) -> None:
    """Remove the prefills from a batch; a mixed batch becomes a decode batch."""
    batch.input_ids = None
    batch.filter_batch(keep_indices=list(range(num_prefills, len(batch.reqs))))
    batch.chunked_req = None
    batch.decoding_reqs = None
    if batch.reqs:
        batch.forward_mode = ForwardMode.DECODE
