"""Two engines, a gateway and a router, started and used as docs/fleet.md says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from batch.scenarios import lines
from chaos_bench.router import router_command
from sglang_coserve.local_server import free_port
from srt.documentation.blocks import ROOT, SHELL, blocks_of, environment

pytestmark = pytest.mark.heavy

NUM_LINES = 24
GIVE_UP_S = 400
DOCUMENTED_PORTS = ("30000", "30001", "30002", "30010")


def test_one_machine_serves_a_batch_and_online_requests(small_model: Path, tmp_path: Path) -> None:
    if router_command("smg") is None:
        pytest.skip("the router smg is not installed")
    said = f"test/srt/documentation/{Path(__file__).name}"
    page = ROOT / "docs" / "fleet.md"
    marked = page.read_text().count(f"<!-- not run: {said}")
    starts, uses = [block.script for block in blocks_of(page) if "30010" in block.script]
    assert marked == 2
    script = f"{starts}\n{uses}".replace("MODEL", str(small_model))
    for port in DOCUMENTED_PORTS:
        script = script.replace(port, str(free_port()))
    # Not what takes long, and two engines share the cores.
    script = script.replace(" --admin-api-key", " --startup-profile-seconds 1 --admin-api-key")
    script = script.replace("smg launch", f"smg launch --prometheus-port {free_port()}")
    (tmp_path / "prompts.jsonl").write_bytes(lines(NUM_LINES, model="default", max_tokens=4))
    log_path = tmp_path / "log"
    with log_path.open("wb") as log:
        typed = subprocess.Popen(
            [*SHELL, script],
            cwd=tmp_path,
            env=environment() | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        status = typed.wait(GIVE_UP_S)
    finally:
        # What was started in the background, too.
        os.killpg(typed.pid, signal.SIGKILL)
        typed.wait()
    answered = log_path.read_text()
    assert status == 0, answered[-4000:]
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").open()]
    assert len({record["custom_id"] for record in records}) == len(records) == NUM_LINES
    assert all(record["response"]["status_code"] == 200 for record in records)
    assert '"choices"' in answered
