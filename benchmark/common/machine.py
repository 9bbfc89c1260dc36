"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

from sglang_coserve import __version__
from sglang_coserve.srt.cpu import defaults as cpu

_PACKAGES: Final = ("sglang", "torch", "transformers", "numpy")


def describe_machine() -> dict[str, Any]:
    """Return the hardware and the versions as plain JSON values."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "sglang_coserve": __version__,
        "commit": commit(),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    if not cpu.has_cuda():
        return None
    import torch

    return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"


def commit() -> str | None:
    """Return the checkout's commit, with ``-dirty`` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
