"""The oldest supported and the newest ``openai`` client work unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srt.batch_server.deployment import API_KEY, Deployment

pytestmark = pytest.mark.heavy

PROGRAM = Path(__file__).with_name("openai_client.py")


@pytest.mark.parametrize("version", ["2.0.0", "3.54.0"])
def test_a_version_of_the_client(deployment: Deployment, tmp_path: Path, version: str) -> None:
    """With packages of its own: the server's environment has another version."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path)]
    installed = subprocess.run(
        [*install, f"openai=={version}"], capture_output=True, text=True, timeout=300, check=False
    )
    if installed.returncode:
        pytest.skip(f"openai {version} cannot be installed here: {installed.stderr[-300:]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), f"{deployment.base_url}/v1", API_KEY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.split() == [version]
