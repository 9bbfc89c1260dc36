"""The requests of the engine, sorted by what they may do in the step that is being planned."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step import Lane
from sglang_coserve.core.step_stats import StepStats

__all__ = ["StepRequests"]

_DECODING = RequestState.DECODING
_PAUSED = RequestState.PAUSED
_PREFILLING = RequestState.PREFILLING
_ONLINE = RequestClass.ONLINE


class StepRequests:
    """The admitted requests of a snapshot, by class, and by whether they prefill or decode."""

    def __init__(self, snapshot: EngineSnapshot, lane: Lane, *, rides: bool) -> None:
        """Sort the requests of a snapshot. O(requests).

        Args:
            snapshot: The engine; for the offline lane, without online requests.
            lane: Lane of the step.
            rides: Paused offline decodes may join a step of the shared lane.
        """
        self.snapshot = snapshot
        self.online_decodes: list[Request] = []
        """Online requests that decode or are paused."""
        self.online_prefills: list[Request] = []
        """Online requests whose prefill is unfinished, the running one first."""
        self.offline_decodes: list[Request] = []
        """Offline requests that decode or are paused, in order of admission; those that cannot
        pause before the others."""
        self.offline_prefills: list[Request] = []
        """Offline requests whose prefill is unfinished, the running one first."""
        self._staying_decodes: list[Request] = []
        """Paused offline decodes that do not join this step."""
        self.prefills: list[Request] = []
        """All whose prefill is unfinished, in order of admission."""
        self.has_paused = False
        online_decodes, offline_decodes = self.online_decodes, self.offline_decodes
        is_alone = lane is Lane.OFFLINE
        num_steady = 0
        for request in snapshot.admitted:
            info, state, _, _, _, _ = request
            if state is _PAUSED:
                self.has_paused = True
            elif state is not _DECODING:
                self.prefills.append(request)
                prefills = (
                    self.online_prefills if info.request_class is _ONLINE else self.offline_prefills
                )
                # The engine runs one unfinished prefill at a time: it continues first.
                prefills.insert(0 if state is _PREFILLING else len(prefills), request)
                continue
            if info.request_class is _ONLINE:
                online_decodes.append(request)
            elif state is _PAUSED and not (is_alone or (rides and info.can_pause)):
                # One that cannot pause would have to be retracted whenever it does not fit.
                self._staying_decodes.append(request)
            elif info.can_pause:
                offline_decodes.append(request)
            else:
                offline_decodes.insert(num_steady, request)
                num_steady += 1

    @property
    def has_online(self) -> bool:
        """True when an online request waits or runs, in this or another micro-batch."""
        return (
            bool(self.online_decodes)
            or self.has_online_prompts
            or any(request.info.is_online for request in self.snapshot.elsewhere)
        )

    def online_prompts(self) -> Iterator[Request]:
        """Yield the online requests without a first token, in order of arrival.

        Those that wait are described when they are reached, so only a few should be.
        """
        yield from self.online_prefills
        yield from self.snapshot.waiting

    def first_prompts(self, tokens: int) -> list[Request]:
        """Return the first online prompts that have so many tokens together, or all. O(tokens)."""
        first: list[Request] = []
        for request in self.online_prompts():
            first.append(request)
            tokens -= request.tokens_to_compute
            if tokens <= 0:
                break
        return first

    @property
    def num_online_prompts(self) -> int:
        """How many online requests have no first token."""
        return len(self.online_prefills) + len(self.snapshot.waiting)

    @property
    def online_decode_stats(self) -> StepStats:
        """Sums over a step of the online decodes alone. O(requests)."""
        decodes = self.online_decodes
        keys = len(decodes) + sum([request.computed_tokens for request in decodes])
        return StepStats(decode_requests=len(decodes), decode_context_tokens=keys)

    @property
    def has_online_prompts(self) -> bool:
        """True when an online prompt waits, or is computed in part."""
        return bool(self.online_prefills or self.snapshot.waiting)

    @property
    def offline(self) -> list[Request]:
        """All offline requests."""
        return self.offline_decodes + self._staying_decodes + self.offline_prefills

    @property
    def num_decodes(self) -> int:
        """How many requests decode or are paused."""
        return len(self.snapshot.admitted) - len(self.prefills)
