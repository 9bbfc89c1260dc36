"""The load of a replica on its way from the scheduler to the HTTP server.

SGLang's schedulers publish a ``LoadSnapshot`` in shared memory, or over ZMQ from another node:
with each prefill, every few decodes and when they are idle. Ours counts steps in which only offline
requests begin like decodes: that may be every step, and a load looks at every request. SGLang's own
fields say what an online request finds. Ours travels in it, so it costs the scheduler no answer,
and nobody who does not know of it sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import msgspec
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.engine_load import ReplicaLoad
from sglang_coserve.srt import compat
from sglang_coserve.srt.monitoring.online_load import OnlineLoadInquirer
from sglang_coserve.srt.monitoring.replica_load import LoadReporter

__all__ = [
    "CoserveLoadSnapshot",
    "ReportingLoadInquirer",
    "count_offline_in_snapshots",
    "read_our_snapshots",
]

_DECODER: Final = "sglang.srt.managers.load_snapshot.snapshot_decoder"


class CoserveLoadSnapshot(LoadSnapshot):
    """SGLang's, with ours beside it."""

    coserve: dict[str, Any] | None = None
    """A ``ReplicaLoad`` in plain values; None before the first of them."""


@dataclass(frozen=True, kw_only=True)
class ReportingLoadInquirer(SchedulerLoadInquirer):
    """SGLang's for online requests, whose snapshots have our load in them."""

    get_advisory: Callable[[], Advisory]
    get_online: Callable[[], OnlineLoadInquirer]
    get_load: Callable[[], LoadReporter]

    @classmethod
    def like(
        cls,
        stock: SchedulerLoadInquirer,
        get_advisory: Callable[[], Advisory],
        get_online: Callable[[], OnlineLoadInquirer],
        get_load: Callable[[], LoadReporter],
    ) -> ReportingLoadInquirer:
        """Return one that asks for the same as ``stock``, of online requests, and for our load."""
        asked = {field.name: getattr(stock, field.name) for field in fields(stock)}
        asked |= {
            "get_running_batch": lambda: get_online().running_batch(),
            "get_waiting_queue": lambda: get_online().waiting_queue(),
            "get_chunked_req": lambda: get_online().chunked_req(),
        }
        return cls(**asked, get_advisory=get_advisory, get_online=get_online, get_load=get_load)

    def get_loads(self) -> CoserveLoadSnapshot:
        """Return the load now, without ours if that is off. O(requests)."""
        ours = self.get_advisory().ask("load", self._both, None)
        return ours or CoserveLoadSnapshot(**_fields(SchedulerLoadInquirer.get_loads(self)))

    def _both(self) -> CoserveLoadSnapshot | None:
        load = self.get_load()
        held = load.held()
        pool_stats = _PoolStats(self.get_online().get_pool_stats(held))
        pools: dict[str, Any] = {"pool_stats_observer": pool_stats}
        stock = SchedulerLoadInquirer.get_loads(replace(self, **pools))
        return CoserveLoadSnapshot(**_fields(stock), coserve=load.load(held).model_dump())


@dataclass(frozen=True)
class _PoolStats:
    """Stands in for SGLang's observer of the pools."""

    stats: Any

    def get_pool_stats(self) -> Any:
        return self.stats


def read_our_snapshots() -> None:
    """Have this process read snapshots with our part; the others read past it."""
    compat.replace(_DECODER, msgspec.msgpack.Decoder(CoserveLoadSnapshot))


def count_offline_in_snapshots() -> None:
    """Have this process read loads of both classes.

    For the controller of replicas, which sends requests of both to the least loaded one: by
    their online requests alone, all lines of a batch would go to the same.
    """
    compat.replace(_DECODER, _BothClasses())


class _BothClasses:
    """Decodes a snapshot to one of SGLang's, offline requests among the others."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(CoserveLoadSnapshot)

    def decode(self, data: bytes) -> LoadSnapshot:
        snapshot = self._decoder.decode(data)
        if snapshot.coserve is not None:
            load = ReplicaLoad(**snapshot.coserve)
            snapshot.num_running_reqs += load.offline.running
            snapshot.num_waiting_reqs += load.offline.waiting
            snapshot.num_total_tokens += load.offline.outstanding_tokens
        return snapshot


def _fields(snapshot: LoadSnapshot) -> dict[str, Any]:
    names: Iterable[str] = snapshot.__struct_fields__
    return {name: getattr(snapshot, name) for name in names}
