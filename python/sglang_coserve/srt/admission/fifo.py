"""Offline requests first come, first served, whenever no online request waits.

A scheduling pass offers some of them to SGLang only when no online request is
waiting or being prefilled, behind everything else, and takes back what was not
admitted.  Without offline requests a pass is SGLang's after a constant-time test.
Decisions depend on neither clock nor chance, so tensor-parallel ranks stay in step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import compress
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import Ending
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.errors import CoserveError
from sglang_coserve.srt.admission.fifo_pass import FifoPass
from sglang_coserve.srt.admission.planned_waiting import CoolDown
from sglang_coserve.srt.admission.protocol import OFFLINE_EVENTS
from sglang_coserve.srt.profiling.latency_source import known_latency_model
from sglang_coserve.srt.steps.batch_results import BatchResults
from sglang_coserve.srt.steps.clocks import RankClock
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction, Prefill
from sglang_coserve.srt.steps.request_ledger import ending_of

__all__ = ["FifoAdmission", "OfflineWaiting"]

Req = Any
ScheduleBatch = Any


class OfflineWaiting:
    """A FIFO of SGLang ``Req`` objects, with a cool-down for those put back."""

    def __init__(self, passes_to_settle: int = 1) -> None:
        """``passes_to_settle``: see ``CoolDown``."""
        self._ready: deque[Req] = deque()
        self._cooling = CoolDown(passes_to_settle)

    def __len__(self) -> int:
        """Count all waiting requests, cooling ones included."""
        return len(self._ready) + len(self._cooling)

    def __iter__(self) -> Iterator[Req]:
        """Iterate in the order of admission."""
        yield from self._cooling
        yield from self._ready

    @property
    def has_ready(self) -> bool:
        """True when a request may be admitted in this pass."""
        return bool(self._ready)

    def append(self, req: Req) -> None:
        """Add a request that has not run yet."""
        self._ready.append(req)

    def put_back(self, req: Req) -> None:
        """Return a request that ran and was released: first in line, after the cool-down."""
        self._cooling.put_back(req)

    def start_pass(self) -> None:
        """Count a pass of the cool-downs."""
        self._ready.extendleft(self._cooling.start_pass())

    def take(self, count: int) -> list[Req]:
        """Remove and return up to ``count`` ready requests. O(count)."""
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def put_back_taken(self, reqs: Iterable[Req]) -> None:
        """Return requests, in their order, that were taken in this pass but not admitted."""
        self._ready.extendleft(reversed(list(reqs)))

    def remove_if(self, predicate: Callable[[Req], bool]) -> list[Req]:
        """Remove and return all requests for which ``predicate`` holds. O(n)."""
        removed = [req for req in self if predicate(req)]
        if removed:
            gone = {id(req) for req in removed}
            self._ready = deque(req for req in self._ready if id(req) not in gone)
            self._cooling.remove(lambda req: id(req) in gone)
        return removed


class FifoAdmission:
    """See the module's docstring; an ``Admission``."""

    event_names: tuple[str, ...] = OFFLINE_EVENTS
    terms = None
    budget_s: float | None = None

    def __init__(
        self,
        scheduler: Any,
        config: CoserveConfig,
        *,
        pools: KvPools,
        view: EngineView,
        retraction: OfflineRetraction,
        clock: RankClock,
        events: Counter[str],
        advisory: Advisory,
        forget: Callable[[Req, Ending], None],
    ) -> None:
        """``forget`` is called with each request that has ended, and how."""
        self.interference = Interference.measured(config.slos())
        self._scheduler = scheduler
        self._config = config
        self._pools = pools
        self._view = view
        self._retraction = retraction
        self._clock = clock
        self._events = events
        self._tell = advisory.tell
        self._forget = forget
        self._waiting = OfflineWaiting(view.passes_to_settle)
        self._pass = FifoPass(
            scheduler,
            config.offline_max_running,
            pools=pools,
            view=view,
            retraction=retraction,
            events=events,
            waiting=self._waiting,
        )

    # --- Who waits -----------------------------------------------------------------------

    def enqueue(self, req: Req) -> None:
        """See ``Admission``. One that ran goes first."""
        if req.retraction_count:
            self._waiting.put_back(req)
        else:
            self._waiting.append(req)

    def arrived(self, req: Req, info: RequestInfo) -> None:
        """See ``Admission``."""
        del req
        self._tell("judgement", self.interference.arrived, info)

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """See ``Admission``."""
        return self._waiting.remove_if(matches)

    def num_waiting(self) -> int:
        """See ``Admission``."""
        return len(self._waiting)

    def take_launched(self) -> list[Req]:
        """See ``Admission``."""
        return []

    def num_running(self) -> int:
        """See ``Admission``."""
        return 0  # All are in the running batch.

    def kept(self) -> Iterable[Req]:
        """See ``Admission``: requests that ended are forgotten at once."""
        return self._waiting

    def forget(self, rid: str, ending: Ending) -> None:
        """See ``Admission``."""
        self._tell("judgement", self.interference.ended, rid, ending)

    # --- One pass ------------------------------------------------------------------------

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Admit online requests as SGLang does; offline ones only when none of them waits."""
        self._waiting.start_pass()
        return self._pass.admit(running_batch, prefill)

    def settle(self, last_batch: Any) -> Any:
        """See ``Admission``: nothing has a lane of its own."""
        return last_batch

    def stopped(self) -> None:
        """See ``Admission``: nothing stops."""

    def give_up(self) -> None:
        """See ``Admission``: nothing is suspended."""

    def launched(self, batch: ScheduleBatch | None) -> None:
        """See ``Admission``: nothing is learned from it."""

    def processed(self, results: BatchResults) -> None:
        """Record who got a token, and forget those that ended."""
        now_s = self._clock.now_s()
        for req in compress(results.reqs, results.has_token):
            self._tell("judgement", self.interference.produced, req.rid, now_s)
        for req in results.ended:
            self._forget(req, ending_of(req.finished_reason.to_json()))

    # --- What others ask about -----------------------------------------------------------

    def latency_model(self) -> LatencyModel | None:
        """See ``Admission``. Nothing here depends on it, and the start must not: it is for
        expected rates alone."""
        with suppress(CoserveError):
            return known_latency_model(self._scheduler, self._config)
        return None

    def state(self) -> dict[str, Any]:
        """See ``Admission``."""
        return {}
