"""The most offline work that was possible beside the online requests of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bound_bench.upper_bound import Capacity, OfflineShape, offline_bound, required
from coserve_bench.options import Options
from coserve_bench.run_record import RunRecord
from coserve_bench.systems import BASELINE
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.metrics import Outcome, SloTargets
from sglang_coserve.profiler import load_profile
from sglang_coserve.slo_search.machine import EngineMachine
from sglang_coserve.workload import TraceRequest

__all__ = ["OfflineBounds"]

_LATE_SHARE: Final = 0.01
"""Of the online requests that may miss their targets, as where a P99 is the target."""


@dataclass(frozen=True, slots=True)
class OfflineBounds:
    """Computes them with a latency profile: docs/benchmarks.md, "An upper bound"."""

    model: LatencyModel
    capacity: Capacity
    """Of the baseline's engine: others may have smaller chunks, for reasons of latency."""

    shape: OfflineShape

    @classmethod
    def of(cls, options: Options, records: Sequence[RunRecord]) -> OfflineBounds | None:
        """Return None without a profile, or where offline requests differ in their lengths."""
        limits = [
            record.provenance["engine"]
            for record in records
            if record.key.system == BASELINE and "engine" in record.provenance
        ]
        if options.latency_profile is None or options.offline.file is not None or not limits:
            return None
        machine = EngineMachine(**limits[0])
        return cls(
            model=load_profile(options.latency_profile).latency_model,
            # Decodes of running requests come on top of a chunk.
            capacity=Capacity(
                batch_tokens=machine.max_batch_tokens + machine.max_running,
                requests=machine.max_running,
                kv_tokens=machine.kv_capacity_tokens,
            ),
            shape=OfflineShape(options.offline.prompt_tokens, options.offline.output_tokens),
        )

    def tokens_per_s(self, record: RunRecord, targets: SloTargets) -> float:
        """Return the bound beside the online requests of a run. 0: not even these fit.

        Raises:
            ConfigError: the profile's model is not convex.
        """
        online = [
            TraceRequest(number, each.arrival_s, each.prompt_tokens, len(each.token_times_s))
            for number, each in enumerate(record.online)
            if each.outcome is Outcome.FINISHED
        ]
        needed = required(online, targets, record.window_s, late_share=_LATE_SHARE)
        return offline_bound(self.model, self.capacity, self.shape, needed, record.window_s)
