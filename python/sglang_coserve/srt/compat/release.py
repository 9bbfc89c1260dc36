"""Releases the slot and KV of requests that are retracted, rolled back or aborted."""

from __future__ import annotations

from typing import Any

from sglang_coserve.srt.compat.by_version import release_kv
from sglang_coserve.srt.marks.request_marks import is_offline

__all__ = ["release_aborted", "release_for_requeue", "release_uncomputed"]


def release_for_requeue(req: Any, tree_cache: Any) -> None:
    """Free a running request's slot and KV so that it can wait again with its progress.

    What it has computed goes to the radix cache, from where it is evicted when
    memory is needed and matched again when not.
    """
    release_kv(req, tree_cache, keeps=True)
    req.reset_for_retract()


def release_uncomputed(req: Any, tree_cache: Any) -> None:
    """Free the slot and KV of a request whose prefill was prepared but has not run.

    Nothing goes to the radix cache. For an online request this is not counted as a retraction.
    """
    retractions = req.retraction_count
    release_kv(req, tree_cache, keeps=False)
    req.reset_for_retract()
    if not is_offline(req):
        req.retraction_count = retractions


def release_aborted(req: Any, tree_cache: Any) -> None:
    """Free the slot and KV of a request that is aborted while no batch holds it."""
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(req, "Aborted")
    release_kv(req, tree_cache, keeps=True)
