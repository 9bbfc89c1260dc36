"""The host pages of an offline request while it runs, and the memory that they are in."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sglang_coserve.srt import compat

Req = Any

Run = tuple[int, int, int]
"""A run of consecutive tokens of a request: its row in SGLang's ``req_to_token``, the first
position in the row, and the number of tokens."""


class RequestCheckpoint:
    """The host pages of one request, after its prefix in the radix tree.

    The prefix, ``start_tokens`` long, is saved as nodes of the tree, once for all requests
    that share it. Only whole pages are saved, in order: first those saved, then those being
    copied, then dirty ones.
    """

    def __init__(self, req: Req, page_tokens: int) -> None:
        self.req = req
        self.start_tokens = compat.protected_tokens(req)
        self.saved_tokens = 0
        """Whose copy is complete."""

        self.sent_tokens = 0
        """Whose copy has begun or is complete."""

        self._full_tokens = 0
        self.host_slots = array("q")
        """One slot for each token saved or being copied."""
        self.is_released = False
        self._page_tokens = page_tokens

    @property
    def dirty_tokens(self) -> int:
        """Computed tokens after the prefix whose copy has not begun."""
        return self._full_tokens - self.sent_tokens

    def computed(self, tokens: int) -> None:
        """Record that the request's first ``tokens`` tokens have KV."""
        pages = (tokens - self.start_tokens) // self._page_tokens
        self._full_tokens = max(self._full_tokens, pages * self._page_tokens)

    def begin_copy(self, host_slots: Sequence[int]) -> Run:
        """Mark the first dirty pages as being copied; return their run."""
        begin = self.start_tokens + self.sent_tokens
        assert 0 < len(host_slots) <= self.dirty_tokens, "only dirty pages can be copied"
        self.sent_tokens += len(host_slots)
        self.host_slots.extend(host_slots)
        return compat.slot_of(self.req), begin, len(host_slots)

    def end_copy(self, tokens: int) -> None:
        """Record that the oldest copy, of ``tokens`` tokens, is complete."""
        assert 0 < tokens <= self.sent_tokens - self.saved_tokens, "only those are in flight"
        self.saved_tokens += tokens

    def release(self) -> torch.Tensor:
        """End the request's checkpoint; return the host slots of its saved pages.

        The slots of copies in flight are freed when these end.
        """
        self.is_released = True
        return torch.from_numpy(np.array(self.host_slots[: self.saved_tokens]))


def slots_of_runs(req_to_token: torch.Tensor, runs: Iterable[Run]) -> torch.Tensor:
    """Return the device slots (int64) of the tokens of all runs, with a single index operation.

    The host goes on at once: under overlap scheduling the stream waits for the pass that runs.
    """
    places, width = array("q"), req_to_token.shape[1]
    for row, begin, tokens in runs:
        first = row * width + begin
        places.extend(range(first, first + tokens))
    index, is_cuda = torch.frombuffer(places, dtype=torch.int64), req_to_token.is_cuda
    # A copy from memory that is not pinned would wait.
    index = (index.pin_memory() if is_cuda else index).to(req_to_token.device, non_blocking=is_cuda)
    return req_to_token.view(-1).index_select(0, index).long()


Slots = Any
"""A tensor of host slots, one per token."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off after host memory was refused: 1, 2, 4 … steps without a request.

    Time is counted in steps, so that all ranks of a tensor-parallel engine decide alike.
    """

    most_steps: int = 256
    failures: int = 0
    retry_step: int = 0

    def may_try(self, step: int) -> bool:
        """Return whether host memory may be requested in this step."""
        return step >= self.retry_step

    def failed(self, step: int) -> Backoff:
        """Return the back-off after a refusal in this step."""
        wait = min(2**self.failures, self.most_steps)
        return replace(self, failures=min(self.failures + 1, 32), retry_step=step + 1 + wait)

    def succeeded(self) -> Backoff:
        """Return the back-off after memory was granted."""
        return replace(self, failures=0, retry_step=0) if self.failures else self


class HostSpace:
    """Allocates and frees the host slots of a pool."""

    def __init__(self, pool: Any, counts: Counter[str]) -> None:
        self.limit_tokens = int(pool.logical_size)
        """The most tokens that may be held."""

        self._pool = pool
        self._backoff = Backoff()
        self._counts = counts

    @property
    def used_tokens(self) -> int:
        """The tokens that are held."""
        return int(self._pool.logical_size - self._pool.available_size())

    @property
    def free_tokens(self) -> int:
        """The tokens that can be allocated without reclaiming any."""
        return self.limit_tokens - self.used_tokens

    def may_try(self, step: int) -> bool:
        """Return whether this is no back-off after a refusal."""
        return self._backoff.may_try(step)

    def alloc(self, tokens: int, step: int) -> Slots | None:
        """Allocate slots; return None, and back off, if the limit or the pool is exhausted."""
        slots = self._pool.alloc(tokens) if tokens <= self.free_tokens else None
        if slots is None:
            self._counts["allocation_failures"] += 1
            self._backoff = self._backoff.failed(step)
            return None
        self._backoff = self._backoff.succeeded()
        return slots

    def free(self, slots: Slots) -> None:
        """Free slots; no copy to or from them may be in flight."""
        self._pool.free(slots)
