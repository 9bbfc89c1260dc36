"""``python -m`` works where people try it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["sglang_coserve", "sglang_coserve.cli"])
def test_a_module_is_the_command_line(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "submit" in shown
    assert "simulate" in shown


def test_a_process_that_is_not_ours_can_import_sglang() -> None:
    # Beside a CPU build of torch, torchvision fails without sgl-kernel-patches/cpu.
    command = [sys.executable, "-m", "sglang.bench_serving", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
