"""Classifies a prepared batch (prefill, decode, mixed), and sums up its requests."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import compress
from typing import Any

from sglang_coserve.core.step_stats import StepStats

__all__ = ["ForwardKind", "kind_of", "num_decodes", "stats_of"]

ScheduleBatch = Any


class ForwardKind(Enum):
    """The kind of a batch: prefills, decodes, or both."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"


def kind_of(batch: ScheduleBatch) -> ForwardKind | None:
    """Return the kind of a batch; None for anything but plain prefills and decodes."""
    mode = batch.forward_mode
    if mode.is_decode():
        return ForwardKind.DECODE
    if mode.is_mixed():
        return ForwardKind.MIXED
    return ForwardKind.EXTEND if mode.is_extend_without_speculative() else None


def num_decodes(batch: ScheduleBatch, kind: ForwardKind) -> int:
    """Return the number of decodes in a batch; they are the last of its requests."""
    if kind is ForwardKind.EXTEND:
        return 0
    return len(batch.reqs) if kind is ForwardKind.DECODE else len(batch.decoding_reqs)


def stats_of(batch: ScheduleBatch, kind: ForwardKind, chosen: Sequence[bool]) -> StepStats:
    """Return the sums over the chosen requests of a prepared batch. O(requests)."""
    num_prefills = len(batch.reqs) - num_decodes(batch, kind)
    prefills = [
        (batch.extend_lens[place], batch.prefix_lens[place])
        for place in range(num_prefills)
        if chosen[place]
    ]
    # The length of a decode includes the token that it computes: C + 1.
    lengths = batch.seq_lens_cpu[num_prefills:].tolist()
    decodes = list(compress(lengths, chosen[num_prefills:]))
    return StepStats.of(prefills)._replace(
        decode_requests=len(decodes), decode_context_tokens=sum(decodes)
    )
