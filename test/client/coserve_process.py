"""Runs the real ``coserve`` command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROCESS_TIMEOUT_S = 60.0

COMMAND = [sys.executable, "-c", "from sglang_coserve.cli import main; main()"]


def environment() -> dict[str, str]:
    """This process's, without anything that would change the command's defaults."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COSERVE_", "OPENAI_"))
    }


def start_submit(source: Path, output: Path, base_url: str, *flags: str) -> subprocess.Popen[str]:
    """Start ``coserve submit``."""
    arguments = [str(source), "-o", str(output), "--base-url", base_url, *flags]
    return subprocess.Popen(
        [*COMMAND, "submit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process; return its exit code, standard output and standard error."""
    try:
        stdout, stderr = process.communicate(timeout=PROCESS_TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def submit(source: Path, output: Path, base_url: str, *flags: str) -> tuple[int, str, str]:
    """Run ``coserve submit`` to its end."""
    return end(start_submit(source, output, base_url, *flags))


def submit_json(
    source: Path, output: Path, base_url: str, *flags: str
) -> tuple[int, dict[str, Any]]:
    """Run ``coserve submit --json`` and return its exit code and its summary."""
    code, stdout, stderr = submit(source, output, base_url, "--json", "--quiet", *flags)
    assert stdout, f"no summary; standard error: {stderr}"
    summary: dict[str, Any] = json.loads(stdout)
    return code, summary


def coserve(*arguments: str) -> tuple[int, str, str]:
    """Run any ``coserve`` command."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        env=environment(),
    )
    return done.returncode, done.stdout, done.stderr
