"""The process of a step: what it was told, and where it puts what it found."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coserve_bench.machine import describe_machine
from gpu.child import run_child
from gpu.driver import INCOMPLETE_EXIT, REFUSED_EXIT
from gpu.llama_shape import write_llama_shape
from gpu.record import read_json, write_text
from gpu.setting import Setting
from sglang_coserve.errors import CoserveError
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.small_model import SmallModelSpec, make_small_model

__all__ = ["RefusedError", "Task", "run_step"]

_CONTEXT_TOKENS = 32768
_CHUNK_TOKENS = 8192
_GRACE_S = 30.0
_TOOL_TIMEOUT_S = 10


class RefusedError(CoserveError):
    """The step cannot be measured here."""


class Task:
    """One attempt at one step."""

    def __init__(self, folder: Path, setting: Setting, seconds: float) -> None:
        self.folder = folder
        """For files of the step; earlier attempts wrote to it too."""

        self.setting = setting
        self._end_s = time.monotonic() + seconds
        self._reported = read_json(folder / "reported.json") or {}
        self._reported.pop("refusal", None)
        self._machine = {**describe_machine(), **_gpu_versions()}

    @property
    def name(self) -> str:
        """The step's name."""
        return self.folder.name

    @property
    def remaining_s(self) -> float:
        """Seconds until the step is stopped."""
        return self._end_s - time.monotonic()

    @property
    def dry_run(self) -> bool:
        """See ``Setting``."""
        return self.setting.dry_run

    @property
    def figures(self) -> dict[str, Any]:
        """What was reported last, in an earlier attempt as well."""
        figures: dict[str, Any] = self._reported.get("figures", {})
        return figures

    def report(self, figures: dict[str, Any], *tables: str) -> None:
        """Write the figures so far; a later report, and a later attempt, replaces them."""
        self._reported = {"machine": self._machine, "figures": figures, "tables": tables}
        self._write()

    def refuse(self, reason: str) -> None:
        """Write why nothing can be measured."""
        self._reported |= {"machine": self._machine, "refusal": reason}
        self._write()

    def of(self, step: str) -> Path:
        """Return the folder of another step, which may not be there."""
        return self.folder.parent / step

    def model_path(self) -> Path:
        """Return the model's folder, made if need be."""
        if self.setting.model_path is not None:
            return Path(self.setting.model_path)
        folder = self.of("model")
        if self.dry_run:
            return make_small_model(folder, SmallModelSpec())
        return write_llama_shape(folder)

    @property
    def attention_backend(self) -> str:
        """The one that was asked for, or what ``smoke`` had to use in its place."""
        smoke = read_json(self.of("smoke") / "reported.json") or {}
        found = smoke.get("figures", {}).get("attention_backend")
        return str(found or self.setting.attention_backend)

    def engine_settings(self) -> dict[str, Any]:
        """Return the ``ServerArgs`` fields that every engine gets, but for the model."""
        if self.dry_run:
            return {"max_total_tokens": 16384, "chunked_prefill_size": 512}
        return {
            "load_format": self.setting.load_format,
            "dtype": "bfloat16",
            "attention_backend": self.attention_backend,
            "sampling_backend": self.setting.sampling_backend,
            "context_length": _CONTEXT_TOKENS,
            "chunked_prefill_size": _CHUNK_TOKENS,
            "mem_fraction_static": 0.85,
            "cuda_graph_max_bs_decode": 256,
        }

    def server_flags(self) -> list[str]:
        """Return the same as flags, those of the user behind them."""
        flags = []
        for name, value in self.engine_settings().items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        return [*flags, *self.setting.server_flags]

    def run(self, command: Sequence[str], *, spare_s: float = _GRACE_S) -> int:
        """Run a command until it ends, or until ``spare_s`` are left; return its exit status.

        Its output goes to the step's log.
        """
        print("+", *command, flush=True)
        limit_s = max(1.0, self.remaining_s - spare_s)
        ended = run_child(command, limit_s=limit_s, grace_s=_GRACE_S, log=sys.stdout.buffer)
        print(f"exit status {ended.code}", flush=True)
        return ended.code

    def _write(self) -> None:
        text = json.dumps(self._reported, indent=2, ensure_ascii=False)
        write_text(self.folder / "reported.json", text + "\n")


def run_step(measure: Callable[[Task], bool]) -> int:
    """Run a step as the driver's command line asks; return the exit status.

    ``measure`` returns whether everything is measured; False lets the driver try
    again when there is more time.
    """
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--setting", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    task = Task(args.folder, Setting.read(args.setting), args.seconds)
    try:
        with terminate_as_interrupt():
            return 0 if measure(task) else INCOMPLETE_EXIT
    except RefusedError as error:
        task.refuse(str(error))
        print(f"refused: {error}")
        return REFUSED_EXIT
    except CoserveError as error:
        print(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        print("interrupted")
        return 130


def _gpu_versions() -> dict[str, str]:
    """Return what only a GPU machine has, as far as it is there."""
    import torch

    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
        driver = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    return {"driver_and_memory": driver, "cuda": str(torch.version.cuda)}
