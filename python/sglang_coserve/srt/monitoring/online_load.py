"""The engine as an online request finds it, for the figures that SGLang reports under its names.

Routers send a request where ``/v1/loads`` or the metrics show the least load. Offline requests give
way to it, so they are not in these figures; ``/coserve/load`` and ``coserve_*`` have them.
Without offline requests every figure is SGLang's.

SGLang's schedulers publish a ``LoadSnapshot`` in shared memory, or over ZMQ from another node:
with each prefill, every few decodes and when they are idle. Ours counts steps in which only offline
requests begin like decodes: that may be every step, and a load looks at every request. Our load
travels in it, so it costs the scheduler no answer, and nobody who does not know of it sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from msgspec.structs import asdict
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

from sglang_coserve.http_lines.engine_load import ReplicaLoad
from sglang_coserve.srt import compat
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.monitoring.replica_load import HeldKv, LoadReporter
from sglang_coserve.srt.steps.engine_parts import EngineParts

Req = Any

_DECODER: Final = "sglang.srt.managers.load_snapshot.snapshot_decoder"


class CoserveLoadSnapshot(LoadSnapshot):
    """SGLang's, with ours beside it."""

    coserve: dict[str, Any] | None = None
    """A ``ReplicaLoad`` in plain values; None before the first of them."""


class OnlineLoad:
    """The engine as an online request finds it."""

    def __init__(self, parts: EngineParts, load: LoadReporter) -> None:
        self.advisory = parts.advisory
        self._scheduler = parts.scheduler
        self._pools = parts.pools
        self._load = load

    def running_batch(self) -> Any:
        """Return something with the ``reqs`` of SGLang's running batch that are online."""
        return SimpleNamespace(reqs=_online(self._scheduler.running_batch.reqs))

    def waiting_queue(self) -> list[Req]:
        """Return those of SGLang's queue that are online."""
        return _online(self._scheduler.waiting_queue)

    def chunked_req(self) -> Req | None:
        """Return the unfinished prefill, if it is online."""
        chunk = self._scheduler.chunked_req
        return None if chunk is None or is_offline(chunk) else chunk

    def get_pool_stats(self, held: HeldKv | None = None) -> Any:
        """Return SGLang's ``PoolStats``, where what offline requests alone hold is evictable.

        ``held`` is who holds KV; without it that takes O(requests with KV + nodes of the radix
        cache above them).
        """
        stats = self._scheduler.pool_stats_observer.get_pool_stats()
        online, offline, tokens = held or self._load.held()
        if not offline:
            return stats
        changed = _less("full", stats, tokens.offline)
        if stats.is_hybrid_swa:
            changed |= _less("swa", stats, self._pools.held_in_window(offline))
        if stats.is_hybrid_ssm:
            num_requests = len(offline) + len(online)  # Each has as many states as any other.
            changed |= _less("mamba", stats, stats.mamba_num_used * len(offline) // num_requests)
        return replace(stats, **changed)

    def snapshot(self, inquirer: SchedulerLoadInquirer) -> CoserveLoadSnapshot:
        """Return the load now, which ``inquirer`` finds, with ours. O(requests)."""
        held = self._load.held()
        pool_stats = SimpleNamespace(get_pool_stats=partial(self.get_pool_stats, held))
        pools: dict[str, Any] = {"pool_stats_observer": pool_stats}
        stock = SchedulerLoadInquirer.get_loads(replace(inquirer, **pools))
        return CoserveLoadSnapshot(**asdict(stock), coserve=self._load.load(held).model_dump())

    def put_into(self, stats: Any) -> None:
        """Let SGLang's ``SchedulerStats`` say what an online request finds."""
        counts = type(stats.num_running_reqs)
        has_priorities = self._scheduler.enable_priority_scheduling
        stats.num_running_reqs = counts.from_reqs(self.running_batch().reqs, has_priorities)
        stats.num_queue_reqs = counts.from_reqs(self.waiting_queue(), has_priorities)
        self.get_pool_stats().update_scheduler_stats(stats)


@dataclass(frozen=True, kw_only=True)
class ReportingLoadInquirer(SchedulerLoadInquirer):
    """SGLang's for online requests, whose snapshots have our load in them."""

    get_online: Callable[[], OnlineLoad]

    @classmethod
    def like(
        cls, stock: SchedulerLoadInquirer, get_online: Callable[[], OnlineLoad]
    ) -> ReportingLoadInquirer:
        """Return one that asks for the same as ``stock``, of online requests, and for our load."""
        asked = {field.name: getattr(stock, field.name) for field in fields(stock)}
        asked |= {
            "get_running_batch": lambda: get_online().running_batch(),
            "get_waiting_queue": lambda: get_online().waiting_queue(),
            "get_chunked_req": lambda: get_online().chunked_req(),
        }
        return cls(**asked, get_online=get_online)

    def get_loads(self) -> CoserveLoadSnapshot:
        """Return the load now, without ours if that is off. O(requests)."""
        online = self.get_online()
        ours = online.advisory.ask("load", lambda: online.snapshot(self), None)
        return ours or CoserveLoadSnapshot(**asdict(SchedulerLoadInquirer.get_loads(self)))


def _online(reqs: list[Req]) -> list[Req]:
    return [req for req in reqs if not is_offline(req)]


def _less(pool: str, stats: Any, tokens: int) -> dict[str, Any]:
    """Return the figures of a pool of which so many used tokens are evictable."""
    usage = "mamba_usage" if pool == "mamba" else f"{pool}_token_usage"
    used = getattr(stats, f"{pool}_num_used")
    tokens = min(tokens, used)
    share = (used - tokens) / used if used else 0.0
    return {
        f"{pool}_num_used": used - tokens,
        f"{pool}_evictable_size": getattr(stats, f"{pool}_evictable_size") + tokens,
        usage: getattr(stats, usage) * share,
    }


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
