"""The host pages of a running offline request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_coserve.core.kv_checkpoint import RequestPages
from sglang_coserve.srt import compat

__all__ = ["RequestCheckpoint", "Run", "slots_of_runs"]

Req = Any

Run = tuple[int, int, int]
"""A run of consecutive tokens of a request: its row in SGLang's ``req_to_token``, the first
position in the row, and the number of tokens."""


class RequestCheckpoint:
    """The host pages of one request, after its prefix in the radix tree.

    The prefix, ``start_tokens`` long, is saved as nodes of the tree, once for all requests
    that share it. Only whole pages are saved.
    """

    def __init__(self, req: Req, page_tokens: int) -> None:
        self.req = req
        self.start_tokens = compat.protected_tokens(req)
        self.pages = RequestPages()
        self.host_slots = array("q")
        """One slot for each token saved or being copied."""
        self.is_released = False
        self._page_tokens = page_tokens

    @property
    def dirty_tokens(self) -> int:
        """Computed tokens after the prefix whose copy has not begun."""
        return (self.pages.total - self.pages.sent) * self._page_tokens

    @property
    def saved_end_tokens(self) -> int:
        """Number of the request's first tokens that are saved, provided that its prefix is."""
        return self.start_tokens + self.pages.saved * self._page_tokens

    def computed(self, tokens: int) -> None:
        """Record that the request's first ``tokens`` tokens have KV."""
        pages = (tokens - self.start_tokens) // self._page_tokens
        if pages > self.pages.total:
            self.pages.grow(pages)

    def begin_copy(self, host_slots: Sequence[int]) -> Run:
        """Mark the first dirty pages as being copied; return their run."""
        begin = self.start_tokens + self.pages.sent * self._page_tokens
        self.pages.begin_copy(len(host_slots) // self._page_tokens)
        self.host_slots.extend(host_slots)
        return compat.slot_of(self.req), begin, len(host_slots)

    def end_copy(self, tokens: int) -> None:
        """Record that the oldest copy, of ``tokens`` tokens, is complete."""
        self.pages.end_copy(tokens // self._page_tokens)

    def release(self) -> torch.Tensor:
        """End the request's checkpoint; return the host slots of its saved pages.

        The slots of copies in flight are freed when these end.
        """
        self.is_released = True
        return torch.from_numpy(np.array(self.host_slots[: self.pages.saved * self._page_tokens]))


def slots_of_runs(req_to_token: torch.Tensor, runs: Iterable[Run]) -> torch.Tensor:
    """Return the device slots (int64) of the tokens of all runs, with a single index operation."""
    places, width = array("q"), req_to_token.shape[1]
    for row, begin, tokens in runs:
        first = row * width + begin
        places.extend(range(first, first + tokens))
    index = torch.frombuffer(places, dtype=torch.int64).to(req_to_token.device)
    return req_to_token.view(-1).index_select(0, index).long()
