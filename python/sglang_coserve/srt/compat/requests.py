"""Answers requests that are in no batch, releases what they hold, and says which can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from sglang_coserve.srt.compat.by_version import release_kv, set_computed_tokens, slot_of


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


def allocated_tokens(req: Any) -> int:
    """Return how many tokens of a request have slots; the last page may have free ones, too."""
    return int(req.kv.kv_allocated_len)


def may_be_full(running_batch: Any) -> bool:
    """Return whether SGLang may have found no room for one more request.

    SGLang marks a running batch as full when a request does not fit. An empty batch is not marked
    since 0.5.22, and not marked by older versions with a hierarchical cache.
    """
    return bool(running_batch.batch_is_full or running_batch.is_empty())


def drop_ended(running_batch: Any) -> None:
    """Drop the requests that have ended from SGLang's running batch.

    With them the batch is no longer full. SGLang sees that only when it drops them itself: 0.5.17
    would never fill an empty batch again.
    """
    size = running_batch.batch_size()
    running_batch.filter_batch()
    if running_batch.batch_size() < size:
        running_batch.batch_is_full = False


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


def cached_tokens_of(tree_cache: Any, reqs: Sequence[Any], besides: Sequence[Any]) -> int:
    """Return the tokens in the radix cache that these requests hold, and not those ``besides``.

    Each node counts once. O(requests + nodes above them).
    """
    # Since 0.5.22 most caches keep their nodes to themselves.
    core = getattr(tree_cache, "tree_core", None)
    if core is not None:
        paths, others = (
            core.collect_path_info([req.last_node for req in some]) for some in (reqs, besides)
        )
        lengths = {node.node_id: node.path_end - node.path_start for path in paths for node in path}
        held = {node.node_id for path in others for node in path}
        return sum(tokens for name, tokens in lengths.items() if name not in held)
    seen: set[int] = set()
    tokens = 0
    for some, counts in ((besides, False), (reqs, True)):
        for req in some:
            node = tree_cache.resolve_node_handle(req.last_node)
            # Above a node that was seen, all were.
            while node is not None and node.parent is not None and id(node) not in seen:
                seen.add(id(node))
                if counts:
                    tokens += len(node.key)
                node = node.parent
    return tokens


STATEFUL_PARAMS: Final[Mapping[str, object]] = {
    # Penalties count output tokens as they are sampled, so a continuation would count anew.
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    # The state of a grammar depends on the tokens it has read.
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    # With several choices it is unknown which one the tokens belong to.
    "n": 1,
    # A custom processor may use these in any way.
    "custom_params": None,
}
"""Sampling parameters that, unless they have this value, make sampling depend on more state than
the tokens so far."""

STATEFUL_FIELDS: Final = (
    # Outputs per token are not journaled.
    "return_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_sampling_mask",
    # State outside the request.
    "custom_logit_processor",
    "session_id",
    "session_params",
    "input_embeds",
    "max_thinking_tokens",
    # Another adapter may have that name by then.
    "lora_path",
)
"""Fields of SGLang's request that must be unset."""


def can_continue(request: Any, preferred_params: Mapping[str, Any] | None = None) -> bool:
    """Return whether prompt and output tokens are the whole state of ``request``.

    If so, a generation that is interrupted after any token and continued gives the same result
    as one without interruption. ``request`` is SGLang's ``GenerateReqInput`` before it is
    normalised, ``preferred_params`` the server's defaults for sampling parameters.
    """
    if isinstance(request.input_ids, list):
        is_single = bool(request.input_ids) and isinstance(request.input_ids[0], int)
    else:
        is_single = isinstance(request.text, str)
    if not is_single or request.contains_mm_input():
        return False
    if any(getattr(request, field) for field in STATEFUL_FIELDS):
        return False
    params = {**(preferred_params or {}), **(request.sampling_params or {})}
    return all(
        not params.get(name) or params[name] == neutral for name, neutral in STATEFUL_PARAMS.items()
    )
