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
