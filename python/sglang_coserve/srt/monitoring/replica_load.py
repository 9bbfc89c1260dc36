"""What a scheduler reports of its load: the ``ReplicaLoad`` of the requests it has."""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.learned_times import expected_tokens_per_s, lines_at_a_time
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.http_lines.engine_load import ClassLoad, ReplicaLoad
from sglang_coserve.srt.admission.admission import Admission
from sglang_coserve.srt.compat import computed_tokens
from sglang_coserve.srt.monitoring.online_share import OnlineShare
from sglang_coserve.srt.request_moves import RequestMoves
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.kv_pools import KvByClass

_RECENT_S: Final = 1.0
"""As often as those ask who publish it under other names."""

Req = Any


class HeldKv(NamedTuple):
    """The requests with KV by class, and the slots that they hold."""

    online: list[Req]
    offline: list[Req]
    tokens: KvByClass


class ReportedLoad(NamedTuple):
    """A load, when it was taken, and the KV by class."""

    at_s: float
    kv: KvByClass
    load: ReplicaLoad


class LoadReporter:
    """See the module's docstring. Lives in the scheduler process."""

    def __init__(self, parts: EngineParts, admission: Admission, moves: RequestMoves) -> None:
        scheduler, config = parts.scheduler, parts.config
        self._moves = moves
        self._admission = admission
        self._queues = parts.queues
        self._pools = parts.pools
        self._requests = parts.requests
        self._lane = parts.lane
        self._max_requests: int = scheduler.max_running_requests
        self._chunk_tokens: int = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self._max_offline = min(
            config.offline_max_running or self._max_requests, self._max_requests
        )
        self._share = OnlineShare()
        self._last: ReportedLoad | None = None
        self._rated: tuple[LatencyModel | None, float] = (None, 0.0)
        """The model that a rate was computed of last, and the rate."""

    def held(self) -> HeldKv:
        """Return who holds KV now. O(requests + nodes of the radix tree above them)."""
        online, offline = self._requests.with_kv()
        return HeldKv(online, offline, self._pools.by_class(online, offline))

    def recent(self) -> ReportedLoad:
        """Return the load that was reported last, or the load now if that was over a second ago.

        SGLang asks for it with each prefill and every few decodes; there is no need to look at
        every request once more.
        """
        if self._last is None or time.perf_counter() - self._last.at_s > _RECENT_S:
            self.load(self.held())
        assert self._last is not None
        return self._last

    def load(self, held: HeldKv) -> ReplicaLoad:
        """Return the load as it is now; ``held`` is who holds KV. O(requests with KV)."""
        online, offline, kv = held
        requests = min(self._max_offline, self._max_requests - len(online))
        load = ReplicaLoad(
            online=self._class_load(RequestClass.ONLINE, online),
            offline=self._class_load(RequestClass.OFFLINE, offline),
            kv_tokens=self._pools.total_tokens,
            online_kv_tokens=kv.online,
            reclaimable_kv_tokens=kv.offline + kv.cached,
            reclaim_s=self._reclaim_s(offline, online),
            headroom_tokens_per_s=self._headroom_tokens_per_s(has_online=bool(online)),
            max_lines=lines_at_a_time(
                kv_tokens=self._pools.total_tokens - kv.online,
                requests=requests,
                lines=len(self._requests.of_class(RequestClass.OFFLINE)),
                line_tokens=self._requests.length_tokens(RequestClass.OFFLINE),
            ),
            pool=self._moves.pool,
            wants=self._moves.wants(
                online,
                offline,
                free_kv_tokens=self._pools.total_tokens - kv.online - kv.offline,
                free_requests=requests - len(offline),
            ),
        )
        self._last = ReportedLoad(time.perf_counter(), kv, load)
        return load

    def rate_alone_per_s(self) -> float:
        """Return the tokens a second that offline work would get of the engine alone, now."""
        model, (rated, rate) = self._admission.core.model, self._rated
        if model is not rated:
            rate = expected_tokens_per_s(
                model,
                kv_tokens=self._pools.total_tokens,
                max_requests=self._max_offline,
                chunk_tokens=self._chunk_tokens,
            )
            self._rated = model, rate
        return rate

    def _class_load(self, request_class: RequestClass, running: list[Req]) -> ClassLoad:
        requests = self._requests
        done_tokens = sum(min(computed_tokens(r), requests[r.rid].length_tokens) for r in running)
        return ClassLoad(
            running=len(running),
            waiting=len(requests.of_class(request_class)) - len(running),
            outstanding_tokens=requests.length_tokens(request_class) - done_tokens,
        )

    def _reclaim_s(self, offline: list[Req], online: list[Req]) -> float:
        """Return how long a step of these requests goes on until offline ones can be retracted."""
        if not offline:
            return 0.0
        chunk = self._queues.chunk
        decodes = [computed_tokens(req) for req in (*offline, *online) if req is not chunk]
        prefills = []
        if chunk is not None:
            left_tokens = len(chunk.origin_input_ids) + len(chunk.output_ids)
            left_tokens -= computed_tokens(chunk)
            tokens = min(self._chunk_tokens, left_tokens)
            prefills = [(max(tokens, 1), computed_tokens(chunk))]
        step_s = self._admission.core.model.predict(
            StepStats.of(prefills=prefills, decodes=decodes)
        )
        # A step with online requests is theirs, too, and runs to its end.
        return step_s if online else step_s * self._lane.safepoints.stop_share

    def _headroom_tokens_per_s(self, *, has_online: bool) -> float:
        if self._admission.stopped_by is not None:
            return 0.0
        core, rate = self._admission.core, self.rate_alone_per_s()
        online_share = self._share.at(time.perf_counter(), core.work.totals.online_s)
        fillable = core.fillable_share if has_online else 1.0
        return rate * (1 - online_share) * fillable
