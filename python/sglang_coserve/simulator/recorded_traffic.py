"""The traffic of a server's ``--record-plans``, to be simulated again.

Requests arrive when they arrived, with the outputs that they had; the machine takes for a
step what the measured steps teach the latency model. Left out is what the recording does not
have: prompts of online requests are known by their length alone, so what the prefix cache
held of one need not be computed, and nobody else finds it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from sglang_coserve.core.latency_model import LatencyModel, Sample
from sglang_coserve.core.learned_model import LearnedModel
from sglang_coserve.core.offline_queue import PackedTokens, QueuedRequest, pack_tokens
from sglang_coserve.core.offline_queue.tokens import TOKEN_BYTES
from sglang_coserve.core.recording import SchedulerSetup, read_recording
from sglang_coserve.core.recording.events import (
    Arrived,
    Event,
    Finished,
    OfflineAdded,
    Planned,
    Updated,
)
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo
from sglang_coserve.errors import InputFileError
from sglang_coserve.metrics import Outcome, RequestTimeline
from sglang_coserve.simulator.request import SimRequest

__all__ = ["RecordedTraffic", "read_traffic"]

_FIRST_MADE: Final = 1 << 31
"""Token ids from here on are in no prompt."""


@dataclass(slots=True)
class _Online:
    info: RequestInfo
    cached_tokens: int
    token_times_s: list[float] = field(default_factory=list)
    ending: Ending | None = None


@dataclass(slots=True)
class _Offline:
    request: QueuedRequest
    generated_tokens: int = 0
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """What a server was sent, what became of it, and what its machine is like."""

    setup: SchedulerSetup
    engine: EngineSnapshot
    """The first one: what does not change of it."""

    true_model: LatencyModel
    """As the measured steps taught it."""

    noise_cv: float
    """Coefficient of variation of the steps' times around that."""

    began_s: float
    interval_s: float
    online: tuple[_Online, ...]
    offline: tuple[_Offline, ...]

    @property
    def timelines(self) -> list[RequestTimeline]:
        """The online requests as they were served, timed in the scheduler."""
        return [
            RequestTimeline(
                rid=each.info.rid,
                arrival_s=each.info.arrival_s - self.began_s,
                token_times_s=tuple(time_s - self.began_s for time_s in each.token_times_s),
                prompt_tokens=each.info.prompt_tokens,
                outcome=Outcome.FINISHED
                if each.ending is Ending.COMPLETE
                else Outcome.UNFINISHED
                if each.ending is None
                else Outcome.FAILED,
            )
            for each in self.online
        ]

    @property
    def offline_tokens(self) -> int:
        """Prompt and output tokens of the offline requests, as far as they came."""
        return sum(
            each.request.num_prompt_tokens + each.generated_tokens
            for each in self.offline
            if each.generated_tokens
        )

    def online_requests(self) -> list[SimRequest]:
        """Return the online requests, to be served once."""
        return [self._online_request(number, each) for number, each in enumerate(self.online)]

    def offline_requests(self, more: float = 0.0) -> list[SimRequest]:
        """Return the offline requests, and such a part of them once more; fewer if negative.

        Those are spread evenly, arrive with the ones they are copies of, and share no prefix.
        """
        made: list[SimRequest] = []
        due = 0.0
        for each in self.offline:
            due += 1 + more
            for copy in range(int(due)):
                made.append(self._offline_request(len(made), each, copy))
            due -= int(due)
        return made

    def _online_request(self, number: int, each: _Online) -> SimRequest:
        info = each.info
        prompt_tokens = max(1, info.prompt_tokens - each.cached_tokens)
        most = max(1, info.max_new_tokens)
        output = most if each.ending is None else len(each.token_times_s)
        return SimRequest(
            replace(
                info,
                rid=f"online-{number}",
                prompt_tokens=prompt_tokens,
                max_new_tokens=most,
                arrival_s=info.arrival_s - self.began_s,
            ),
            min(max(output, 1), most),
            partial(_unshared, 2 * number, prompt_tokens),
            2 * number,
        )

    def _offline_request(self, number: int, each: _Offline, copy: int) -> SimRequest:
        request = each.request
        most = max(1, request.max_new_tokens)
        output = most if each.ending is None else each.generated_tokens
        made = SimRequest(
            RequestInfo(
                rid=f"offline-{number}",
                request_class=RequestClass.OFFLINE,
                prompt_tokens=request.num_prompt_tokens,
                max_new_tokens=most,
                arrival_s=max(0.0, request.arrival_s - self.began_s),
            ),
            min(max(output, 1), most),
            _prompt_of(request, number if copy else None),
            2 * number + 1,
            None if request.deadline_s is None else request.deadline_s - self.began_s,
        )
        made.expected_output_tokens = request.expected_output_tokens
        return made


def read_traffic(lines: Iterable[str], source: str) -> RecordedTraffic:
    """Return the traffic of a recording; prompts of all offline requests are held in memory.

    Raises:
        InputFileError: a line is not as it was written, or nothing was planned.
    """
    setup, events = read_recording(lines, source)
    reader = _Reader(setup)
    for event in events:
        reader.take(event)
    return reader.traffic(source)


class _Reader:
    def __init__(self, setup: SchedulerSetup) -> None:
        self._setup = setup
        self._learned = LearnedModel(setup.profile.latency_model, refines=True)
        self._online: list[_Online] = []
        self._offline: list[_Offline] = []
        # A name may be another request's once its first one has ended.
        self._live_online: dict[str, _Online] = {}
        self._live_offline: dict[str, _Offline] = {}
        self._engine: EngineSnapshot | None = None
        self._end_s = 0.0
        self._ratios: list[float] = []
        """Of each step's time to what was predicted then."""

    def take(self, event: Event) -> None:
        match event:
            case Arrived(info, cached_tokens):
                online = _Online(info, cached_tokens)
                self._online.append(online)
                self._live_online[info.rid] = online
            case OfflineAdded(request):
                offline = _Offline(request, request.num_generated_tokens)
                self._offline.append(offline)
                self._live_offline[request.rid] = offline
            case Planned(snapshot):
                self._engine = self._engine or snapshot
                self._end_s = max(self._end_s, snapshot.now_s)
                for seen in snapshot.admitted:
                    if (recorded := self._live_offline.get(seen.info.rid)) is not None:
                        recorded.generated_tokens = seen.generated_tokens
            case Updated(result):
                self._end_s = max(self._end_s, result.started_s)
                for info, _, token_s in result.served:
                    served = self._live_online.get(info.rid)
                    if served is not None and token_s is not None:
                        served.token_times_s.append(token_s)
                if result.seconds is not None and not result.batch.is_empty:
                    predicted_s = self._learned.model.predict(result.batch)
                    self._ratios.append(result.seconds / predicted_s)
                    self._learned.observe(Sample(result.batch, result.seconds), result.overlapping)
            case Finished(rid, ending):
                self._end(rid, ending)

    def traffic(self, source: str) -> RecordedTraffic:
        if self._engine is None:
            raise InputFileError(f"{source}: nothing was planned in it: there was no offline work")
        arrivals_s = [each.info.arrival_s for each in self._online]
        arrivals_s += [each.request.arrival_s for each in self._offline]
        began_s = min(arrivals_s, default=self._engine.now_s)
        return RecordedTraffic(
            setup=self._setup,
            engine=self._engine,
            true_model=self._learned.model,
            noise_cv=float(np.std(self._ratios) / np.mean(self._ratios)) if self._ratios else 0.0,
            began_s=began_s,
            interval_s=max(self._end_s - began_s, 1e-3),
            online=tuple(sorted(self._online, key=lambda each: each.info.arrival_s)),
            offline=tuple(sorted(self._offline, key=lambda each: each.request.arrival_s)),
        )

    def _end(self, rid: str, ending: Ending) -> None:
        if (online := self._live_online.pop(rid, None)) is not None:
            online.ending = ending
        if (offline := self._live_offline.pop(rid, None)) is not None:
            offline.ending = ending
            if ending is Ending.COMPLETE:  # The last token came after the last plan.
                most = max(1, offline.request.max_new_tokens)
                offline.generated_tokens = min(offline.generated_tokens + 1, most)


def _unshared(serial: int, tokens: int) -> PackedTokens:
    return pack_tokens([_FIRST_MADE + serial] * tokens)


def _prompt_of(request: QueuedRequest, copy: int | None) -> Callable[[], PackedTokens]:
    """Return what makes the prompt; a copy's begins with a token that no other has."""
    if copy is None:
        return lambda: request.token_ids
    first = pack_tokens([_FIRST_MADE + 2 * copy + 1])
    return lambda: PackedTokens(first + request.token_ids[TOKEN_BYTES:])
