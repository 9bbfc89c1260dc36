"""Copies between KV slot lists and the request-to-token table.

``req_to_token`` is int32 of shape (max requests, max context): row r holds the
KV slot of every token of the request in pool slot r.
"""

from __future__ import annotations

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write ``out_cache_loc`` into the rows' ranges ``[start, end)``, row after row.

    Shapes: the first, third and fourth tensor have one entry per row;
    ``out_cache_loc`` has Σ(end − start) entries.
    """
    position = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset, pool_len):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[position : position + count]
        position += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the rows' ranges ``[start, end)`` into ``out_cache_loc``, row after row."""
    position = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset, pool_len):
        count = end - start
        out_cache_loc[position : position + count] = req_to_token[row, start:end]
        position += count


def _ranges(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, pool_len: int
) -> list[tuple[int, int, int]]:
    ranges = list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
    assert all(0 <= start <= end <= pool_len for _, start, end in ranges), ranges
    return ranges
