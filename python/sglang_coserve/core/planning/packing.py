"""Chooses requests for a batch one by one, where the last choice may be taken back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.planning.offline_phase import decode_offline
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step_stats import StepStats

__all__ = ["Candidate", "Packing"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may join the batch: a request of the snapshot, or one of the offline queue."""

    rid: str
    request: Request | None
    context_tokens: int
    rest_tokens: int
    is_online: bool
    is_decode: bool
    is_new: bool
    residual_s: float
    """Time until its next token is late."""

    @classmethod
    def of_request(cls, request: Request, residual_s: float) -> Candidate:
        """Return the candidate for a request of the snapshot."""
        return cls(
            rid=request.info.rid,
            request=request,
            context_tokens=request.computed_tokens or request.cached_tokens,
            rest_tokens=request.tokens_to_compute,
            is_online=request.info.is_online,
            is_decode=request.state in (RequestState.DECODING, RequestState.PAUSED),
            is_new=request.state is RequestState.WAITING,
            residual_s=residual_s,
        )

    @classmethod
    def of_queued(cls, request: QueuedRequest, cached_tokens: int) -> Candidate:
        """Return the candidate for a request of the offline queue."""
        length_tokens = request.num_prompt_tokens + request.num_generated_tokens
        cached_tokens = min(cached_tokens, length_tokens - 1)
        rest_tokens = length_tokens - cached_tokens
        return cls(request.rid, None, cached_tokens, rest_tokens, False, False, True, math.inf)

    def joined(self, stats: StepStats, tokens: int) -> StepStats:
        """Return the sums with ``tokens`` tokens of this request added."""
        if self.is_decode:
            return stats.with_decode(self.context_tokens)
        return stats.with_prefill(tokens, self.context_tokens)


class _Choice(NamedTuple):
    candidate: Candidate
    tokens: int
    kv_tokens: int
    has_retracted: bool
    """Offline requests were retracted for it."""

    @property
    def is_cut(self) -> bool:
        return self.tokens < self.candidate.rest_tokens


class Packing:
    """Selects candidates under a latency bound and a limit on the number of requests.

    Online candidates may retract offline requests, offline candidates may not. At most
    one prompt is cut: after it, ``add`` refuses any other that would have to be cut.
    """

    def __init__(
        self, batch: StepBuilder, bound_s: float, max_requests: int, headroom_tokens: int
    ) -> None:
        self.stopped_by_bound = False
        """True once a candidate did not fit the latency bound in full."""
        self._batch = batch
        self._bound_s = bound_s
        self._max_requests = max_requests
        self._headroom_tokens = headroom_tokens
        self._stats = batch.work.stats
        self._free_tokens = batch.free_tokens
        self._kv_tokens = 0
        self._slots = 0
        self._online: list[_Choice] = []
        self._offline: list[_Choice] = []
        self._cut: Candidate | None = None

    @property
    def _num_chosen(self) -> int:
        return len(self._online) + len(self._offline)

    def add(self, candidate: Candidate) -> bool:
        """Choose a candidate if at least part of it fits; return whether it was chosen.

        O(1) predictions.
        """
        if self._num_chosen >= self._max_requests:
            return False
        tokens = self._longest(candidate)
        if tokens == 0:
            return False
        kv_tokens = self._kv(candidate)
        has_room = self._has_room(candidate, kv_tokens)
        if not has_room and not (candidate.is_online and self._reclaim(candidate, kv_tokens)):
            return False
        self._choose(_Choice(candidate, tokens, kv_tokens, has_retracted=not has_room))
        return True

    def replace_last_online(self, candidate: Candidate, wait_s: float) -> bool:
        """Replace the online candidate chosen last by another; return whether this was done.

        Done only if that candidate can wait for this step and ``wait_s`` more, and no request was
        retracted for it.
        """
        if not self._online or self._online[-1].has_retracted:
            return False
        leaving = self._drop_last_online()
        predicted_s = self._batch.model.predict(candidate.joined(self._stats, 1))
        if leaving.candidate.residual_s >= predicted_s + wait_s and self.add(candidate):
            return True
        self._choose(leaving)
        return False

    def apply(self) -> None:
        """Add the chosen candidates to the batch."""
        batch = self._batch
        batch.decode(_decodes(self._online))
        self._prefill(self._online)
        decode_offline(batch, _decodes(self._offline))
        self._prefill(self._offline)

    def _prefill(self, choices: list[_Choice]) -> None:
        batch = self._batch
        for candidate, tokens, kv_tokens, _ in choices:
            if candidate.is_decode:
                continue
            # It may have been retracted for an offline decode meanwhile.
            request = candidate.request
            was_retracted = request is not None and batch.memory.is_retracted(request)
            if not was_retracted and batch.memory.has_room(kv_tokens, int(candidate.is_new)):
                batch.prefill(
                    candidate.rid,
                    tokens,
                    candidate.context_tokens,
                    kv_tokens,
                    is_new=candidate.is_new,
                )

    def _longest(self, candidate: Candidate) -> int:
        batch = self._batch
        # The most urgent online request always runs, even over the bound.
        is_first = candidate.is_online and self._stats.is_empty
        bound_s = math.inf if is_first else self._bound_s
        tokens = limit = min(candidate.rest_tokens, self._free_tokens)
        if limit <= 0:
            return 0
        if candidate.is_decode:
            tokens = int(batch.model.predict(candidate.joined(self._stats, 1)) <= bound_s)
        elif bound_s < math.inf:
            tokens = batch.model.max_prefill_tokens(
                self._stats, candidate.context_tokens, limit, bound_s
            )
        self.stopped_by_bound |= tokens < limit
        tokens = batch.memory.align_chunk(candidate.context_tokens, candidate.rest_tokens, tokens)
        return 0 if self._cut is not None and tokens < candidate.rest_tokens else tokens

    def _has_room(self, candidate: Candidate, kv_tokens: int) -> bool:
        if candidate.is_decode and not candidate.is_online:
            return True  # ``apply`` makes room for it, or leaves it out.
        kv_tokens += self._kv_tokens
        if candidate.is_new and not candidate.is_online:
            seen = self._batch.snapshot
            num_requests = len(seen.admitted) + len(seen.elsewhere) + self._slots
            kv_tokens += self._batch.memory.headroom_tokens(self._headroom_tokens, num_requests)
        return self._batch.memory.has_room(
            kv_tokens, self._slots + candidate.is_new, requests=self._num_chosen + 1
        )

    def _reclaim(self, candidate: Candidate, kv_tokens: int) -> bool:
        return self._batch.memory.reclaim(
            self._kv_tokens + kv_tokens,
            self._slots + candidate.is_new,
            requests=self._num_chosen + 1,
        )

    def _kv(self, candidate: Candidate) -> int:
        if candidate.request is not None and candidate.is_decode:
            return self._batch.memory.kv_to_decode([candidate.request])
        return self._batch.memory.kv_to_prefill(
            candidate.context_tokens, candidate.rest_tokens, is_new=candidate.is_new
        )

    def _choose(self, choice: _Choice) -> None:
        candidate, tokens, kv_tokens, _ = choice
        (self._online if candidate.is_online else self._offline).append(choice)
        self._stats = candidate.joined(self._stats, tokens)
        self._free_tokens -= tokens
        self._kv_tokens += kv_tokens
        self._slots += candidate.is_new
        if choice.is_cut:
            self._cut = candidate

    def _drop_last_online(self) -> _Choice:
        choice = self._online.pop()
        candidate, tokens, kv_tokens, _ = choice
        self._stats = _difference(self._stats, candidate.joined(StepStats(), tokens))
        self._free_tokens += tokens
        self._kv_tokens -= kv_tokens
        self._slots -= candidate.is_new
        if self._cut is candidate:
            self._cut = None
        return choice


def _decodes(choices: list[_Choice]) -> list[Request]:
    requests = (choice.candidate.request for choice in choices if choice.candidate.is_decode)
    return [request for request in requests if request is not None]


def _difference(left: StepStats, right: StepStats) -> StepStats:
    return StepStats(*(a - b for a, b in zip(left, right, strict=True)))
