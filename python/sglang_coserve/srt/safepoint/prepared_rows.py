"""Divides a batch that is ready to run, or was ended while it ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_coserve.srt.row_groups import split
from sglang_coserve.srt.safepoint.in_flight import BatchKind, num_decodes

__all__ = ["split_prepared"]

Req = Any
ScheduleBatch = Any


def split_prepared(
    batch: ScheduleBatch, kind: BatchKind, leaves: Callable[[Req], bool]
) -> tuple[ScheduleBatch, torch.Tensor]:
    """Take the rows out of ``batch`` for which ``leaves`` holds, some but not all of its rows.

    Both parts are as ready to run as the whole was. Rows that decode may only leave if they
    have plain state. Returns the rows that left, and the places of the others' tokens in the
    whole: int64 [tokens that stay], on the CPU.
    """
    staying = [row for row, req in enumerate(batch.reqs) if not leaves(req)]
    tokens = _tokens_of(batch, kind, staying)
    rids = {req.rid for req in batch.reqs if leaves(req)}
    left = split(batch, rids, partial(_keep_rows, kind=kind))
    assert left is not None
    assert batch.reqs
    return left, tokens


def _keep_rows(batch: ScheduleBatch, rows: Sequence[int], kind: BatchKind) -> None:
    """Keep these rows of a batch, with all that was prepared for them.

    SGLang keeps the rest of a batch only between passes, without what is for the next one.
    """
    tokens = _tokens_of(batch, kind, rows).to(batch.out_cache_loc.device)
    input_ids, out_cache_loc = batch.input_ids[tokens], batch.out_cache_loc[tokens]
    if kind is not BatchKind.DECODE:
        _keep_extends(batch, rows, num_prefills=len(batch.reqs) - num_decodes(batch, kind))
    batch.input_ids = None
    batch.filter_batch(keep_indices=list(rows))
    batch.input_ids, batch.out_cache_loc = input_ids, out_cache_loc
    if batch.chunked_req not in batch.reqs:
        batch.chunked_req = None


def _keep_extends(batch: ScheduleBatch, rows: Sequence[int], num_prefills: int) -> None:
    """Keep what a prefill or mixed batch has beside a decode batch."""
    if batch.extend_input_logprob_token_ids is not None:
        lens = [
            length - start
            for length, start in zip(
                batch.extend_lens, batch.extend_logprob_start_lens, strict=True
            )
        ]
        places = _places(lens, rows)
        batch.extend_input_logprob_token_ids = batch.extend_input_logprob_token_ids[places]
    for name in ("prefix_lens", "extend_lens", "extend_logprob_start_lens"):
        values = getattr(batch, name)
        setattr(batch, name, [values[row] for row in rows])
    batch.extend_num_tokens = sum(batch.extend_lens)
    decoding = [batch.reqs[row] for row in rows if row >= num_prefills]
    batch.decoding_reqs = decoding or None
    if not decoding:
        batch.forward_mode = ForwardMode.EXTEND


def _tokens_of(batch: ScheduleBatch, kind: BatchKind, rows: Sequence[int]) -> torch.Tensor:
    lens = [1] * len(batch.reqs) if kind is BatchKind.DECODE else batch.extend_lens
    return _places(lens, rows)


def _places(lens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    """Return the places of the rows' items, where row i has ``lens[i]`` of them in turn."""
    ends = list(accumulate(lens))
    return torch.cat([torch.arange(ends[row] - lens[row], ends[row]) for row in rows])
