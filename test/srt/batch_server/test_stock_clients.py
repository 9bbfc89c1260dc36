"""Clients that others wrote work unchanged, each with packages of its own."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from batch.live_app import LiveApp
from srt.batch_server.deployment import API_KEY, Deployment

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}


@pytest.fixture
def python(requirement: str, tmp_path: Path) -> Path:
    """An interpreter that has a client; ``COSERVE_CLIENTS`` names a folder that keeps them."""
    kept = os.environ.get("COSERVE_CLIENTS")
    directory = Path(kept) / requirement if kept else tmp_path / "client"
    made = directory / "bin" / "python"
    if made.exists():
        return made
    venv.create(directory, with_pip=True)
    installed = subprocess.run(
        [made, "-m", "pip", "install", "--quiet", *requirement.split()],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"{requirement} cannot be installed here: {installed.stderr[-300:]}")
    return made


@pytest.mark.parametrize(
    ("requirement", "program"),
    [
        ("openai==2.0.0", "offline_clients.py"),
        ("openai==3.57.0", "offline_clients.py"),
        ("autobatcher==0.12.0", "offline_clients.py"),
        ("instructor==1.17.0", "offline_clients.py"),
        ("langchain-openai==1.7.4", "offline_clients.py"),
        # It does not say that it needs httpx.
        ("openai-batch==0.3.4 httpx", "offline_clients.py"),
        ("guidellm==0.8.1", "offline_clients.py"),
        ("aiperf==0.13.0", "offline_clients.py"),
        ("litellm[proxy]==1.108.7", "litellm_client.py"),
    ],
)
def test_a_client(
    deployment: Deployment,
    python: Path,
    small_model: Path,
    tmp_path: Path,
    requirement: str,
    program: str,
) -> None:
    (tmp_path / "model").symlink_to(small_model)
    with LiveApp(None) as without_batches:
        ran = subprocess.run(
            [
                *(python, HERE / program, requirement.partition("=")[0]),
                *(f"{deployment.base_url}/v1", API_KEY),
                *(f"{without_batches.base_url}/v1", tmp_path),
            ],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr[-4000:]
