"""That the tree is in order, every used host slot has exactly one owner, and the right KV."""

from __future__ import annotations

from typing import Any

import torch


def assert_consistent(cache: Any) -> None:
    """Check a cache with checkpoints. O(tree)."""
    from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import host_slots, subtree

    cache.sanity_check()
    slots = [host_slots(node) for node in subtree(cache.root_node)[1:] if node.backuped]
    slots += [
        torch.tensor(checkpoint.host_slots, dtype=torch.int64)
        for checkpoint in cache._saver.checkpoints.values()
    ]
    slots += _copied_to(cache.copies)
    slots += cache._expected.values()
    taken = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
    assert len(taken.unique()) == len(taken), "a host slot has two owners"
    used = cache.space.used_tokens
    assert len(taken) == used, f"{used - len(taken)} host slots have no owner"


def _copied_to(copies: Any) -> list[torch.Tensor]:
    """The host slots that are copied to but have no owner yet, or no longer."""
    from sglang_coserve.srt.kv_checkpoint.checkpoint_copies import (
        NodeCopy,
        PendingCopy,
        RequestCopy,
    )
    from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import host_slots

    return [
        torch.as_tensor(piece.host_slots)
        for job in copies._jobs.values()
        for piece in job.pieces
        if isinstance(piece, NodeCopy)
        or (isinstance(piece, RequestCopy) and piece.checkpoint.is_released)
        or (isinstance(piece, PendingCopy) and host_slots(piece.node) is None)
    ]


def checking_checkpoints(base: type) -> type:
    """Return a scheduler whose checkpoints are checked after every batch."""

    class CheckingScheduler(base):  # type: ignore[valid-type,misc]
        def process_batch_result(self, batch: Any, result: Any) -> None:
            super().process_batch_result(batch, result)
            assert_consistent(self.tree_cache)
            for checkpoint in self.tree_cache._saver.checkpoints.values():
                _assert_saved(self.tree_cache, checkpoint)

    return CheckingScheduler


def _assert_saved(cache: Any, checkpoint: Any) -> None:
    """What counts as saved is the KV that the request has on the device, and nothing is sent that
    is not computed."""
    from sglang_coserve.srt import compat

    start = checkpoint.start_tokens
    assert start + checkpoint.sent_tokens <= compat.computed_tokens(checkpoint.req)
    end = checkpoint.start_tokens + checkpoint.saved_tokens
    device_slots = cache.req_to_token_pool.req_to_token[
        compat.slot_of(checkpoint.req), start:end
    ].tolist()
    host_slots = list(checkpoint.host_slots[: end - start])
    device, host = cache.token_to_kv_pool_allocator.get_kvcache(), cache.host_pool
    for layer in range(device.layer_num):
        for on_device, on_host in (
            (device.k_buffer, host.k_buffer),
            (device.v_buffer, host.v_buffer),
        ):
            assert on_device[layer][device_slots].equal(on_host[layer][host_slots])
