"""Mends or refuses requests on which SGLang would fail for all, and releases what they hold."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang_coserve.srt.compat.by_version import release_kv, set_computed_tokens, slot_of

__all__ = [
    "check_logit_processor",
    "fill_token_ids_logprobs",
    "lowest_priority",
    "refuse",
    "release_aborted",
    "release_for_requeue",
    "send_abort",
    "undo_allocation",
]


def fill_token_ids_logprobs(logits_output: Any) -> None:
    """Correct the result of a batch in which only some requests asked for ``token_ids_logprob``.

    SGLang 0.5.17 gives the others a plain list where it then wants a tensor, and its
    scheduler process dies of that (sgl-project/sglang#34719).
    """
    import torch

    values = logits_output.next_token_token_ids_logprobs_val
    for i, value in enumerate(values or ()):
        if not torch.is_tensor(value):
            values[i] = torch.tensor(value)


def check_logit_processor(recv_req: Any) -> None:
    """Make a request's custom logit processor once, which SGLang keeps.

    Raises:
        ValueError: it cannot be made; in a batch, that would end the scheduler process.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    processor = getattr(recv_req, "custom_logit_processor", None)  # Embeddings have none.
    if processor is not None:
        try:
            CustomLogitProcessor.from_str(processor)
        except Exception as error:
            raise ValueError(f"custom_logit_processor: {type(error).__name__}: {error}") from error


def refuse(scheduler: Any, request: Any, status: HTTPStatus, message: str) -> None:
    """Answer a request that is in no batch, and in no queue any more, with an error.

    ``request`` is SGLang's ``Req``, or the message of which none could be made.
    """
    from sglang.srt.managers.io_struct import AbortReq

    # ``status`` is no mere number: streams recognize an error by its type.
    reason = {"type": "abort", "status_code": status, "message": message}
    answer = AbortReq(rid=request.rid, finished_reason=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


def send_abort(scheduler: Any, req: Any, message: str | None = None) -> None:
    """Answer an aborted request that is in no batch, with the tokens it has."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = FINISH_ABORT(message)
    if req.output_ids:
        req.finished_reason = reason
        scheduler.output_streamer.stream_output([req], req.return_logprob)
        return
    finished = None if message is None else reason.to_json()
    scheduler.ipc_channels.send_to_tokenizer.send_output(
        AbortReq(rid=req.rid, finished_reason=finished), req
    )


def lowest_priority(low_values_first: bool) -> int:
    """Return the lowest ``Req.priority``."""
    import sys

    return sys.maxsize if low_values_first else -sys.maxsize - 1


def release_for_requeue(req: Any, tree_cache: Any, *, keeps: bool = True) -> None:
    """Free a running request's slot and KV so that it can wait again with its progress.

    If ``keeps``, what it has computed goes to the radix cache, from where it is evicted when
    memory is needed and matched again when not.
    """
    release_kv(req, tree_cache, keeps=keeps)
    req.reset_for_retract()


def undo_allocation(req: Any, tree_cache: Any, tokens: int) -> None:
    """Free the KV that a prepared step has allocated behind a request's first ``tokens``."""
    allocator = tree_cache.token_to_kv_pool_allocator
    page = allocator.page_size
    first_page = -(-tokens // page) * page
    rows = tree_cache.req_to_token_pool.req_to_token
    slots = rows[slot_of(req), first_page : req.kv.kv_allocated_len]
    allocator.free_segment(slots, start_pos=first_page)
    req.kv.kv_allocated_len = tokens
    set_computed_tokens(req, tokens)


def release_aborted(req: Any, tree_cache: Any) -> None:
    """Free the slot and KV of a request that is aborted while no batch holds it."""
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(req, "Aborted")
    release_kv(req, tree_cache, keeps=True)
