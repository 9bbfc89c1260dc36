"""That the tree is in order, and every used host slot has exactly one owner."""

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
