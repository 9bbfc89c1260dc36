"""The load of a replica on its way from the scheduler to the HTTP server.

SGLang's schedulers publish a ``LoadSnapshot`` in shared memory, or over ZMQ from another node:
with each prefill, every few decodes and when they are idle. Ours travels in it, so it costs
the scheduler no answer, and nobody who does not know of it sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

from sglang_coserve.core.engine_load import ReplicaLoad
from sglang_coserve.srt import compat

__all__ = ["CoserveLoadSnapshot", "ReportingLoadInquirer", "read_our_snapshots"]


class CoserveLoadSnapshot(LoadSnapshot):
    """SGLang's, with a ``ReplicaLoad`` in plain values; None before the first of them."""

    coserve: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ReportingLoadInquirer(SchedulerLoadInquirer):
    """SGLang's, whose snapshots have our load in them."""

    get_replica_load: Callable[[], ReplicaLoad]

    @classmethod
    def like(
        cls, stock: SchedulerLoadInquirer, get_replica_load: Callable[[], ReplicaLoad]
    ) -> ReportingLoadInquirer:
        """Return one that asks for the same as ``stock``, and for our load."""
        asked = {field.name: getattr(stock, field.name) for field in fields(stock)}
        return cls(**asked, get_replica_load=get_replica_load)

    def get_loads(self) -> CoserveLoadSnapshot:
        """Return the load now. O(requests)."""
        stock = SchedulerLoadInquirer.get_loads(self)
        told = {name: getattr(stock, name) for name in stock.__struct_fields__}
        return CoserveLoadSnapshot(**told, coserve=self.get_replica_load().model_dump())


def read_our_snapshots() -> None:
    """Have this process read snapshots with our part; the others read past it."""
    compat.replace(
        "sglang.srt.managers.load_snapshot.snapshot_decoder",
        msgspec.msgpack.Decoder(CoserveLoadSnapshot),
    )
