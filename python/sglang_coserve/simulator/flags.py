"""The flags of ``coserve simulate``. Light to import: the command line does it at every start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.terminal import flag

_WORKLOAD: Final = "Workload"
_MACHINE: Final = "Machine"
_POLICY: Final = "Policies and targets"


@dataclass(frozen=True)
class SimulationFlags:
    """A machine, a workload, targets and policies; every field is a flag of the same name."""

    trace: Path | None = flag(
        None,
        "Online requests: a trace in Azure's, BurstGPT's or Mooncake's format. Default: the"
        " bundled sample.",
        group=_WORKLOAD,
    )
    offline: str | None = flag(
        None,
        "Offline requests: a JSONL batch file, a trace, lengths such as 4096x256 for an endless"
        " backlog, or none. Default: the bundled sample.",
        group=_WORKLOAD,
    )
    backlog: int = flag(
        256,
        "Offline requests kept waiting; 0: they come at their trace's times.",
        min=0,
        group=_WORKLOAD,
    )
    hardware: str = flag("h100", "a40, a100, h100, h200, b200 or ascend-910c.", group=_MACHINE)
    model: str = flag(
        "llama-3.1-8b", "A known name such as llama-3.1-70b, or a config.json.", group=_MACHINE
    )
    tp_size: int = flag(1, "Devices that share the model.", min=1, group=_MACHINE)
    policy: str = flag(
        "online_only,coserve",
        "Policies to compare on the same workload, with the defaults of their own settings.",
        metavar="NAME,…",
        group=_POLICY,
    )
    slo_ttft_ms: float | None = flag(
        None,
        "Target for the time to first token.",
        group=_POLICY,
    )
    slo_tpot_ms: float | None = flag(
        None,
        "Target for the time per output token.",
        group=_POLICY,
    )
    slo: list[str] | None = flag(
        None,
        "SLOs instead of targets, as of a server: 'ttft p99 <= 300ms', or relative to online"
        " requests alone: 'tbt p99 <= +10%'.",
        metavar="SLO…",
        group=_POLICY,
    )
    online_slowdown: str | None = flag(
        None,
        "Slowdown of the P99 TTFT, as of a server. Default: 10% for coserve without a TTFT target.",
        metavar="PERCENT",
        group=_POLICY,
    )
    stream_slowdown: str | None = flag(
        None,
        "Slowdown of streams, as of a server. Default: 100% for coserve without a target for gaps.",
        metavar="PERCENT",
        group=_POLICY,
    )
    step_prefill_tokens: int | None = flag(
        None, "Most prompt tokens of a step: HyGen's C. Only with hygen.", min=1, group=_POLICY
    )
    rate: float = flag(1.0, "Factor of the online arrival rate.", group=_WORKLOAD)
    duration: float | None = flag(
        None, "Simulated seconds. Default: the whole trace.", metavar="S", group=_WORKLOAD
    )
    profile: Path | None = flag(
        None, "Latency profile to plan with. Default: a roofline from the datasheet.", group=_POLICY
    )
    true_profile: Path | None = flag(
        None, "How long steps really take. Default: as planned.", group=_MACHINE
    )
    kv_capacity_tokens: int | None = flag(
        None, "KV slots. Default: 90% of the memory less the weights.", min=1, group=_MACHINE
    )
    page_tokens: int = flag(16, "KV page size.", min=1, group=_MACHINE)
    max_context_tokens: int = flag(
        32768, "Longer requests are cut to this.", min=2, group=_WORKLOAD
    )
    max_running: int = flag(256, "Requests that may hold KV.", min=1, group=_MACHINE)
    max_batch_tokens: int = flag(8192, "Tokens of a step.", min=1, group=_MACHINE)
    prefix_cache: bool = flag(True, "Share the KV of equal prefixes.", group=_MACHINE)
    checkpoint_gb_s: float = flag(
        37.0, "KV copied to host memory and back; 0: not at all.", min=0, group=_MACHINE
    )
    safepoint_layers: int = flag(4, "Layers between safepoints; 0: none.", min=0, group=_MACHINE)
    overlap: bool = flag(False, "Plan one step ahead, as SGLang.", group=_MACHINE)
    noise: float = flag(0.0, "Coefficient of variation of step times.", min=0, group=_MACHINE)
    seed: int = flag(0, "Same seed, same result.", group=_WORKLOAD)
