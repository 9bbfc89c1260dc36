"""LiteLLM, as SDK and as proxy, works with the Batch API unchanged, and sees where it is off."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from batch.live_app import LiveApp
from srt.batch_server.deployment import API_KEY, Deployment

pytestmark = pytest.mark.heavy

PROGRAM = Path(__file__).with_name("litellm_client.py")
VERSION = "1.108.7"
SKIPS_DOWNLOADS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has LiteLLM; ``COSERVE_LITELLM_PYTHON`` names one that is there."""
    if given := os.environ.get("COSERVE_LITELLM_PYTHON"):
        return Path(given)
    directory = tmp_path_factory.mktemp("litellm")
    venv.create(directory, with_pip=True)
    made = directory / "bin" / "python"
    installed = subprocess.run(
        [made, "-m", "pip", "install", "--quiet", f"litellm[proxy]=={VERSION}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"litellm {VERSION} cannot be installed here: {installed.stderr[-300:]}")
    return made


def test_ten_lines_through_sdk_and_proxy(
    deployment: Deployment, python: Path, tmp_path: Path
) -> None:
    with LiveApp(None) as without:
        addresses = (f"{deployment.base_url}/v1", API_KEY, f"{without.base_url}/v1")
        ran = subprocess.run(
            [python, str(PROGRAM), *addresses, str(tmp_path)],
            env={**os.environ, **SKIPS_DOWNLOADS},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr[-4000:]
