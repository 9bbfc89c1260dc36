"""The host pages of a running offline row, kept beside its device pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_coserve.core.kv_checkpoint import RowPages

__all__ = ["RowCheckpoint", "slots_of_runs"]

Req = Any


class RowCheckpoint:
    """What host memory holds of one row, behind its prefix in the radix tree.

    The prefix, ``start_tokens`` long, is the tree's to save, once for all rows
    that share it. Only whole pages are saved.
    """

    def __init__(self, req: Req, page_tokens: int) -> None:
        self.req = req
        self.start_tokens: int = req.cache_protected_len
        self.pages = RowPages()
        self.is_released = False
        self._page_tokens = page_tokens
        self._host_slots: list[torch.Tensor] = []

    @property
    def dirty_tokens(self) -> int:
        """Tokens of the row's own that are computed and whose copy has not begun."""
        return self.pages.dirty * self._page_tokens

    @property
    def saved_end_tokens(self) -> int:
        """Tokens from the row's start that are saved, if its prefix is."""
        return self.start_tokens + self.pages.saved * self._page_tokens

    def computed(self, tokens: int) -> None:
        """Note that the row's first ``tokens`` tokens have KV."""
        pages = max(tokens - self.start_tokens, 0) // self._page_tokens
        if pages > self.pages.total:
            self.pages = self.pages.grown(pages)

    def begin_copy(self, tokens: int, host_slots: torch.Tensor) -> int:
        """Let the first dirty pages count as being copied; return where they begin in the row."""
        sent, page_tokens = self.pages.sent, self._page_tokens
        self.pages = self.pages.copy_begun(tokens // page_tokens)
        self._host_slots.append(host_slots)
        return self.start_tokens + sent * page_tokens

    def end_copy(self, tokens: int) -> None:
        """Note that the oldest copy, of so many tokens, is done."""
        self.pages = self.pages.copy_done(tokens // self._page_tokens)

    @property
    def host_slots(self) -> list[torch.Tensor]:
        """All host slots of the row, also those still being copied to."""
        return self._host_slots

    def release(self) -> torch.Tensor:
        """End the row's checkpoint; return the host slots of its saved pages.

        Those of copies still under way are the copies' to free.
        """
        self.is_released = True
        if not self.pages.saved:
            return torch.empty(0, dtype=torch.int64)
        return torch.cat(self._host_slots)[: self.pages.saved * self._page_tokens]


def slots_of_runs(req_to_token: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Return the device slots (int64) of runs of tokens: each a row of the table, where the run
    begins, and its length. One look-up, however many runs."""
    rows, begins, lengths = np.array(runs).T
    ends = np.cumsum(lengths)
    offsets = rows * req_to_token.shape[1] + begins - (ends - lengths)
    places = np.repeat(offsets, lengths) + np.arange(ends[-1])
    index = torch.from_numpy(places).to(req_to_token.device)
    return req_to_token.view(-1).index_select(0, index).long()
