"""What the rows of a batch that is ready to run do, and how much that is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import compress
from typing import Any

from sglang_coserve.core.batch_stats import BatchStats

__all__ = ["BatchKind", "kind_of", "num_decodes", "stats_of"]

ScheduleBatch = Any


class BatchKind(Enum):
    """What the rows of a batch do."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"


def kind_of(batch: ScheduleBatch) -> BatchKind | None:
    """Return what the rows of a batch do; None for anything but plain prefills and decodes."""
    mode = batch.forward_mode
    if mode.is_decode():
        return BatchKind.DECODE
    if mode.is_mixed():
        return BatchKind.MIXED
    return BatchKind.EXTEND if mode.is_extend_without_speculative() else None


def num_decodes(batch: ScheduleBatch, kind: BatchKind) -> int:
    """Return how many of the batch's rows, the last ones, decode."""
    if kind is BatchKind.EXTEND:
        return 0
    return len(batch.reqs) if kind is BatchKind.DECODE else len(batch.decoding_reqs)


def stats_of(batch: ScheduleBatch, kind: BatchKind, chosen: Sequence[bool]) -> BatchStats:
    """Return the sums over the chosen rows of a batch that is ready to run. O(rows)."""
    num_prefills = len(batch.reqs) - num_decodes(batch, kind)
    prefills = [
        (batch.extend_lens[row], batch.prefix_lens[row])
        for row in range(num_prefills)
        if chosen[row]
    ]
    # A decode's length counts the token that it computes: C + 1.
    lengths = batch.seq_lens_cpu[num_prefills:].tolist()
    decodes = list(compress(lengths, chosen[num_prefills:]))
    return BatchStats.of(prefills)._replace(
        decode_requests=len(decodes), decode_context_tokens=sum(decodes)
    )
