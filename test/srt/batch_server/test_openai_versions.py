"""The oldest supported and the newest ``openai`` client, and ``autobatcher``, work unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srt.batch_server.deployment import API_KEY, Deployment

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("package", "version"), [("openai", "2.0.0"), ("openai", "3.57.0"), ("autobatcher", "0.12.0")]
)
def test_a_version_of_a_client(
    deployment: Deployment, tmp_path: Path, package: str, version: str
) -> None:
    """With packages of its own: the server's environment has another version."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path)]
    installed = subprocess.run(
        [*install, f"{package}=={version}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"{package} {version} cannot be installed here: {installed.stderr[-300:]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, HERE / f"{package}_client.py", f"{deployment.base_url}/v1", API_KEY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.split() == [version]
