"""Data directories with which the server does not start, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from srt.batch_server.deployment import Deployment


def flags(model: Path, data: Path) -> list[str]:
    return ["--model-path", str(model), "--coserve-data-dir", str(data)]


def says_once(text: str, reason: str) -> bool:
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return len(errors) == 1 and reason in errors[0]


def test_a_directory_that_others_can_read_stops_the_start(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_coserve.srt.launch import main

    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    assert main(flags(small_model, data)) == 2
    assert says_once(capsys.readouterr().err, f"chmod -R go= {data}")


def test_a_directory_in_use_stops_the_start(
    deployment: Deployment, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_coserve.srt.launch import main

    with deployment.client() as client:
        client.batches.list()  # The directory is in use. Otherwise ``main`` would serve for ever.
    assert main(flags(small_model, deployment.data)) == 2
    assert says_once(capsys.readouterr().err, "in use by another server")
