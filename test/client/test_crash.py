"""``kill -9`` of the client, again and again: one record per line in the end."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from client.batch_files import line, results_by_line, write_lines
from client.coserve_process import end, start_submit, submit_json
from client.fault_server import FaultServer

NUM_KILLS = 10


@pytest.mark.parametrize("seed", [1])
def test_killed_runs_add_up_to_one_record_per_line(
    server: FaultServer, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    lines = [line(f"id-{n}", faults=["slow 0.005"]) for n in range(1, 401)]
    for bad in rng.sample(range(400), 40):
        lines[bad] = rng.choice(
            ["not json", line("id-1"), line(f"bad-{bad}", faults_forever="400")]
        )
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"

    for _ in range(NUM_KILLS):
        finished = set(results_by_line(output)) if output.exists() else set()
        arrived_before = server.prompts()
        process = start_submit(source, output, server.base_url, "--concurrency", "8", "--quiet")
        die_at = len(server.bodies) + rng.randint(1, 30)
        server.on_request = lambda count, at=die_at, doomed=process: (
            doomed.send_signal(signal.SIGKILL) if count >= at else None
        )
        code, _, _ = end(process)
        assert code == -signal.SIGKILL
        # A record may be torn, as if the machine had died in the middle of a write.
        if rng.random() < 0.5:
            with output.open("ab") as file:
                file.write(b'{"id":"batch_req_399_00'[: rng.randint(1, 23)])
        repeated = server.prompts() - arrived_before
        assert not {n for n in finished if f"id-{n}" in repeated}

    server.on_request = lambda _count: None
    code, summary = submit_json(source, output, server.base_url)
    results = results_by_line(output)
    assert sorted(results) == list(range(1, 401))
    assert code == 1, "some lines are bad on purpose"
    assert summary["ok"] + summary["failed"] == 400
    assert summary["failed"] == sum(not result.ok for result in results.values())
    assert 0 < summary["resumed"] < 400
    for number, result in results.items():
        if result.ok:
            assert result.text == f"id-{number}"
