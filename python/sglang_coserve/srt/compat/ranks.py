"""The rank of a scheduler in its engine."""

from __future__ import annotations

from typing import Any

from sglang_coserve.srt.compat.by_version import parallel

__all__ = ["is_first_rank", "num_ranks"]


def is_first_rank(scheduler: Any) -> bool:
    """Return whether this is the rank that receives the requests and reports for all."""
    ranks = parallel(scheduler)
    return bool(ranks.tp_rank == 0 and ranks.pp_rank == 0)


def num_ranks(scheduler: Any) -> int:
    """Return how many ranks decide the same: of all stages, tensor-parallel ones in each."""
    ranks = parallel(scheduler)
    return int(ranks.tp_size * ranks.pp_size)
