"""``python -m`` works where people try it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_coserve.cli import app
from sglang_coserve.fleet.__main__ import main as gateway


def test_the_package_is_the_command_line() -> None:
    command = [sys.executable, "-m", "sglang_coserve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "submit" in shown
    assert "simulate" in shown


@pytest.mark.parametrize("name", [str(one.name) for one in app.registered_commands])
def test_the_help_of_a_command_ends_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "serve":
        pytest.skip("test/srt/test_launch.py reads it, which takes SGLang")
    if name == "gateway":
        with pytest.raises(SystemExit):
            gateway(["--help"])
        shown = capsys.readouterr().out
    else:
        shown = CliRunner().invoke(app, [name, "--help"]).output
    assert f"Example: coserve {name}" in shown
    assert "…" not in shown.replace(",…", "").replace("SLO…", ""), "no flag is cut"


def test_a_process_that_is_not_ours_can_import_sglang() -> None:
    # Beside a CPU build of torch, torchvision fails without sgl-kernel-patches/cpu.
    command = [sys.executable, "-m", "sglang.bench_serving", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
