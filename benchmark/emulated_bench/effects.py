"""The papers' headline effects: the same requests under settings that differ in one mechanism.

And a run of a GPU again, by its profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from emulated_bench.contenders import slos_of
from interference_bench.load import Load, OnlineTraffic, Traffic
from interference_bench.systems import EngineSystem
from interference_bench.traces import BurstyTraffic, RecordedTraffic
from paper import bros, conserve, hygen, ooco
from sglang_coserve.bench_serving.stock import tuned
from sglang_coserve.metrics import SloTargets
from sglang_coserve.profiler.fits import load_profile
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.terminal import markdown_table
from sglang_coserve.workload.trace import sample_path

Row = Mapping[str, Any]
_COLUMNS: Final = {
    "ttft_p50_ms": "TTFT P50 ms",
    "ttft_p99_ms": "P99",
    "itl_p99_ms": "gap P99 ms",
    "normalized_ms": "ms ÷ token",
    "in_ttft": "TTFT kept",
    "in_tpot": "TPOT kept",
    "offline_tokens_per_s": "offline tokens/s",
    "from_prefixes": "from prefixes",
    "recomputed": "recomputed",
    "retracted": "retracted",
    "suspended": "suspended",
}


@dataclass(frozen=True, slots=True)
class Effect:
    """Systems under the same loads."""

    engine: tuple[str, str, int]
    """Model, hardware, devices."""

    loads: Mapping[str, Load]
    systems: Mapping[str, EngineSystem]
    targets: SloTargets
    """What is judged, and what systems are given that take targets: P99 TTFT and P99 gap."""

    scale: float = 0.0
    """Not 0: the targets are the P99s of the first system, scaled."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    """Of ``ServerArgs``, for all systems."""

    profile: Path | None = None
    """By which steps take time, and ours plans them; None: the datasheet's."""

    prefill_launch_s: float = 0.0
    """See ``Emulation``."""

    gaps: str = "tbt"
    """What the target of gaps is of, in ``--slo``."""

    def emulation(self) -> Emulation:
        """Return what is emulated."""
        model, hardware, devices = self.engine
        return Emulation.of(
            model,
            hardware,
            tp_size=devices,
            latency=None if self.profile is None else load_profile(self.profile),
            prefill_launch_s=self.prefill_launch_s,
        )

    def targets_of(self, rows: Sequence[Row]) -> SloTargets:
        """Return the targets after these rows of a load."""
        if not self.scale or not rows:
            return self.targets
        p99s_s = (1e-3 * rows[0][key] for key in ("ttft_p99_ms", "itl_p99_ms"))
        return SloTargets(*(self.scale * p99_s for p99_s in p99s_s))

    def system(self, name: str, targets: SloTargets) -> EngineSystem:
        """Return what runs."""
        system = self.systems[name]
        coserve = system.coserve
        if coserve is not None and system.takes_slo:
            coserve = {**coserve, "slo": slos_of(targets, self.gaps)}
        if coserve is not None and self.profile is not None:
            coserve = {**coserve, "latency_profile": str(self.profile)}
        return replace(system, coserve=coserve, flags={**self.flags, **system.flags})


def _ours(policy: str, **settings: Any) -> EngineSystem:
    return EngineSystem({"offline_policy": policy, **settings}, takes_slo=True)


def _load(
    traffic: Traffic, rate_per_s: float, seconds: float, offline: str, in_flight: int
) -> Load:
    prompt_tokens, output_tokens = map(int, offline.split("x"))
    return Load(traffic, rate_per_s, seconds, 0, prompt_tokens, output_tokens, in_flight)


_8B: Final = ("llama-3.1-8b", "h100", 1)
_7B: Final = ("llama-2-7b", "a100", 1)
_ALONE: Final = EngineSystem(has_offline=False)
_AZURE: Final = RecordedTraffic(sample_path("online"))
_SHAREGPT: Final = BurstyTraffic(bros.SHAREGPT, cv=1.0)


def _of_conserve(cv: float) -> BurstyTraffic:
    return BurstyTraffic(conserve.ONLINE, cv)


_ARRIVAL: Final = _ours("hygen", offline_utility_ratio=0.0)
_H200: Final = Path(__file__).parents[1] / "results" / "gpu_h200" / "profile.json"
EFFECTS: Final[Mapping[str, Effect]] = {
    "conserve_preemption": Effect(
        _8B,
        {"0.1/s": _load(_of_conserve(0.5), 0.1, 600.0, "4096x256", 64)},
        {
            "steps run to their end": _ours("conserve", safepoint_interval=0),
            "a safepoint every 4 layers": _ours("conserve", safepoint_interval=4),
        },
        SloTargets(0.2, 0.07),
    ),
    "conserve_checkpoints": Effect(
        _8B,
        {"2/s, CV 2": _load(_of_conserve(2.0), 2.0, 60.0, "8192x256", 64)},
        {
            "no checkpoints": _ours("conserve"),
            "checkpoints": _ours("conserve", kv_checkpoint="eager"),
        },
        conserve.GIVEN,
        flags={"max_total_tokens": 200_000},
    ),
    "conserve_systems": Effect(
        _8B,
        {
            f"{rate:g}/s, CV {cv:g}": _load(_of_conserve(cv), rate, 60.0, "8192x256", 64)
            for rate, cv in ((2.0, 0.5), (2.0, 2.0), (4.0, 0.5))
        },
        {
            "online alone": _ALONE,
            "conserve": _ours("conserve", kv_checkpoint="eager"),
            "non-preemptive": EngineSystem(
                {"offline_policy": "non_preemptive", "safepoint_interval": 0}
            ),
            "stock, mixed chunks of 2,048": EngineSystem(flags=tuned(2048)),
        },
        SloTargets(),
        scale=1.0,
    ),
    "hygen_prefixes": Effect(
        _7B,
        {
            "1/s": replace(
                _load(_AZURE, 1.0, 30.0, "640x2", 512),
                offline_prefixes=hygen.SUBJECTS,
                offline_shared=hygen.SHARED_TOKENS / 640,
            )
        },
        {
            "arrival, nothing shared": replace(_ARRIVAL, flags={"disable_radix_cache": True}),
            "arrival": _ARRIVAL,
            "prefix order": _ours("hygen", offline_utility_ratio=1.0),
        },
        SloTargets(tpot_s=0.04),
        flags={"max_total_tokens": hygen.TESTBED.kv_capacity_tokens},
    ),
    "hygen_loads": Effect(
        _7B,
        {f"{qps:g}/s": _load(_AZURE, qps, 40.0, "2000x128", 64) for qps in (0.5, 2.0, 4.0)},
        {
            "online alone": _ALONE,
            "gaps +5%": _ours("hygen"),
            "gaps 40 ms": EngineSystem({"offline_policy": "hygen", "slo": ("tbt p99 <= 40ms",)}),
        },
        SloTargets(),
        scale=1.05,
        flags={"max_total_tokens": hygen.TESTBED.kv_capacity_tokens},
    ),
    "ooco": Effect(
        ("qwen2.5-7b", "ascend-910c", 1),
        {f"{n} offline": _load(_AZURE, 4.0, 40.0, "1200x672", n) for n in (32, 128, 256, 512)},
        {
            "ooco": _ours("ooco"),
            "stock, online first": EngineSystem(flags={"enable_priority_scheduling": True}),
        },
        ooco.TARGETS,
    ),
    "bros": Effect(
        ("qwen2.5-14b", "a100", 2),
        {f"{rate:g}/s": _load(_SHAREGPT, rate, 40.0, "768x80", 512) for rate in (4.0, 8.0)},
        {
            "stock, first come, first served": EngineSystem(),
            "bros": _ours("bros", kv_checkpoint="lazy"),
        },
        bros.TARGETS,
        flags={"max_total_tokens": 216_000, "max_running_requests": 256},
    ),
    # What ``bench_gpu.py --steps coload-kv`` measures. Short prefills took that H200 7 to 18 ms.
    "h200": Effect(
        ("llama-3.1-8b", "h200", 1),
        {
            f"2/s, seed {seed}": replace(
                _load(OnlineTraffic((4096, 4096), (256, 256)), 2.0, 40.0, "4096x128", 96),
                seed=seed,
            )
            for seed in range(3)
        },
        {
            "online alone": _ALONE,
            "default": EngineSystem({"offline_policy": "coserve", "online_slowdown": "10%"}),
            "1.2 × alone": _ours("coserve"),
            "1.2 × alone, checkpoints": _ours("coserve", kv_checkpoint="eager"),
            "stock, mixed chunks of 1,024": EngineSystem(flags=tuned(1024)),
        },
        SloTargets(),
        scale=1.2,
        flags={"max_total_tokens": 131_072},
        profile=_H200,
        prefill_launch_s=7e-3,
        gaps="tpot",
    ),
}


def table(found: Mapping[str, Mapping[str, Sequence[Row]]]) -> str:
    """Return all runs; rows by effect and load."""
    lines = [
        [name, load, row["system"], *(_cell(row[key]) for key in _COLUMNS)]
        for name, loads in found.items()
        for load, rows in loads.items()
        for row in rows
    ]
    return markdown_table(("effect", "load", "system", *_COLUMNS.values()), lines)


def _cell(value: float) -> str:
    if value < 1e-3:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
