"""Describes the hardware, model and settings of a scheduler, for latency profiles."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from sglang_coserve.profiler.machine import ProfiledMachine
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu

__all__ = ["machine_of"]

_SETTINGS = (
    "attention_backend",
    "chunked_prefill_size",
    "dtype",
    "enable_torch_compile",
    "kv_cache_dtype",
    "max_running_requests",
    "max_total_tokens",
    "page_size",
    "quantization",
)
"""Fields of ServerArgs that affect step times or the batches that can run."""


def machine_of(scheduler: Any) -> ProfiledMachine:
    """Return the device, the model and the settings that step times depend on."""
    server_args = compat.settings_of(scheduler.server_args)
    runner = scheduler.tp_worker.model_runner.decode_cuda_graph_runner
    model_config = json.loads(scheduler.model_config.hf_config.to_json_string(use_diff=False))
    emulated = model_config.get("emulation")
    return ProfiledMachine(
        hardware=_hardware_name() if emulated is None else f"{emulated['hardware']}, emulated",
        model=server_args.model_path,
        tp_size=server_args.tp_size,
        sglang_version=compat.installed_version() or "",
        model_config=model_config,
        settings={name: getattr(server_args, name, None) for name in _SETTINGS},
        captured_batch_sizes=tuple(sorted(getattr(runner, "capture_bs", ()))),
    )


def _hardware_name() -> str:
    """Return the name of the GPU, or of the CPU with its cores and compute threads."""
    import torch

    if cpu.has_cuda():
        return str(torch.cuda.get_device_name())
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        named = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
        processor = next(named, processor).strip()
    cores = len(os.sched_getaffinity(0))
    return f"CPU {processor}, {cores} cores, {torch.get_num_threads()} threads"
