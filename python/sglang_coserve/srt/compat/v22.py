"""What has changed with SGLang 0.5.22: a cached prefix is a length, its slots are in the request's
row of the table, and a request's KV goes to the radix cache in one way, whether it has ended or
not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_coserve.srt.compat import v17
from sglang_coserve.srt.compat.v19 import holds_kv

__all__ = [
    "cached_prefix_tokens",
    "cached_tokens_of",
    "filter_out",
    "free_prepared",
    "has_unsaved_kv",
    "inserting_cache",
    "place_context",
    "prefix_tokens",
    "release_kv",
    "set_extent",
]

Req = Any
ScheduleBatch = Any


def cached_tokens_of(tree_cache: Any, reqs: Sequence[Req], besides: Sequence[Req]) -> int:
    """As in ``v17``."""
    core = getattr(tree_cache, "tree_core", None)
    if core is None:
        return v17.cached_tokens_of(tree_cache, reqs, besides)
    paths, others = (
        core.collect_path_info([req.last_node for req in some]) for some in (reqs, besides)
    )
    tokens = {node.node_id: node.path_end - node.path_start for path in paths for node in path}
    held = {node.node_id for path in others for node in path}
    return sum(count for name, count in tokens.items() if name not in held)


def cached_prefix_tokens(tree_cache: Any, req: Req) -> int:
    """As in ``v17``. Since 0.5.23 the cache is not changed, so that nothing is kept for longer
    because it was asked for; but where a sliding window or a state decides what can be used, it
    is matched as before."""
    core = getattr(tree_cache, "tree_core", None)
    look_up = getattr(core, "match_full_device_prefix", None)
    has_only_kv = len(getattr(core, "components", ())) == 1
    is_plain = req.session is None and req.positional_embed_overrides is None
    if look_up is None or tree_cache.disable or not has_only_kv or not is_plain or req.is_dllm():
        req.init_next_round_input(tree_cache, cow_mamba=False)
        return prefix_tokens(req)
    from sglang.srt.mem_cache.common import _req_radix_key

    req.refresh_fill_ids()
    ids = req.full_untruncated_fill_ids
    most_tokens = req._compute_max_prefix_len(len(ids))
    return int(look_up(_req_radix_key(tree_cache, req, ids, most_tokens))[0])


def prefix_tokens(req: Req) -> int:
    """As in ``v17``."""
    return int(req.prefix_len)


def set_extent(req: Req, begin: int, end: int) -> None:
    """As in ``v17``."""
    assert begin == req.prefix_len, "a prefill goes on where its prefix ends"
    req.extend_end = end


def has_unsaved_kv(req: Req) -> bool:
    """As in ``v17``."""
    return req.extend_end is not None and bool(req.extend_end > req.prefix_len)


def place_context(req: Req, slots: Any, scheduler: Any) -> None:
    """As in ``v17``: SGLang takes it for a prefill that continues in the row that it has."""
    import torch

    pool = scheduler.req_to_token_pool
    rows = pool.alloc([req])
    assert rows is not None, "the limits promise a row"
    tokens = len(slots)
    pool.write((req.kv.req_pool_idx, slice(0, tokens)), slots.to(torch.int32))
    req.prefix_len = tokens
    req.kv.kv_allocated_len = req.kv.kv_committed_len = tokens
    req.inflight_middle_chunks = 1


def free_prepared(req: Req, scheduler: Any) -> None:
    """As in ``v17``."""
    if holds_kv(req):
        release_kv(req, scheduler.tree_cache, keeps=False)


def release_kv(req: Req, tree_cache: Any, *, keeps: bool) -> None:
    """As in ``v17``, but of an unfinished request nothing goes to a cache that keeps the states
    of layers, too: it would keep a state that the request has moved on."""
    from sglang.srt.mem_cache.common import release_kv_cache

    keeps = keeps and (req.finished() or not tree_cache.supports_mamba())
    release_kv_cache(req, tree_cache, checkpoint=keeps)


def filter_out(batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
    """As in ``v17``."""
    batch.filter_batch(reqs_to_exclude=list(reqs))


def inserting_cache(kind: type) -> type:
    """As in ``v17``."""

    class InsertingCache(kind):
        def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
            with self.inserting(req):
                super().checkpoint_into_tree(req, up_to=up_to, **kwargs)

        def on_release(self, req: Req, *, checkpointed: bool) -> None:
            super().on_release(req, checkpointed=checkpointed)
            self.released(req, req.owned_kv_len() if checkpointed else None)

    return InsertingCache
