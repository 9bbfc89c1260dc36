"""The ``coserve`` command as a user or a script sees it."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from batch.scenarios import line
from client.batch_files import results_by_line, write_lines
from client.coserve_process import (
    COMMAND,
    PROCESS_TIMEOUT_S,
    coserve,
    end,
    environment,
    start_submit,
    submit,
    submit_json,
)
from client.fault_server import FaultServer
from sglang_coserve import __version__


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [line(f"id-{n}") for n in range(1, 41)])


def test_a_batch_ends_with_a_summary(server: FaultServer, source: Path, output: Path) -> None:
    code, stdout, stderr = submit(source, output, server.base_url)
    assert (code, stderr) == (0, "")
    assert "completed: 40 ok, 0 failed\n" in stdout
    assert "200 tokens (120 prompt, 80 completion)" in stdout
    assert str(output) in stdout
    assert submit(source, output, server.base_url, "--quiet") == (0, "", "")
    output.unlink()
    code, stdout, stderr = submit(source, output, server.base_url, "--json")
    summary = json.loads(stdout)
    assert (code, stderr) == (0, "")
    assert summary["state"] == "completed"
    assert (summary["ok"], summary["failed"], summary["resumed"]) == (40, 0, 0)
    assert (summary["prompt_tokens"], summary["completion_tokens"]) == (120, 80)
    assert summary["tokens_per_s"] > summary["completion_tokens_per_s"] > 0
    assert summary["error"] is None


def test_failed_lines_show_in_the_exit_code_and_what_fails_most_often_is_said(
    server: FaultServer, source: Path, output: Path
) -> None:
    write_lines(source, [line("a"), *(line(f"id-{n}", faults=["400"]) for n in range(3))])
    for resumed in (0, 4):
        code, summary = submit_json(source, output, server.base_url)
        assert (code, summary["ok"], summary["failed"]) == (1, 1, 3)
        assert (summary["resumed"], summary["is_local"]) == (resumed, True)
        assert summary["errors"] == str(output.with_name("out.errors.jsonl"))
    assert len(server.bodies) == 4
    code, stdout, _ = submit(source, output, server.base_url)
    assert code == 1
    assert "completed: 1 ok, 3 failed (4 by an earlier run)" in stdout
    (said,) = [each for each in stdout.splitlines() if each.startswith("most often: ")]
    first = json.loads(output.with_name("out.errors.jsonl").read_text().splitlines()[-1])
    assert said.removeprefix("most often: ") in json.dumps(first["response"]["body"])


@pytest.mark.parametrize("command", [["status", "batch_1"], ["list"]])
def test_a_server_without_batches(server: FaultServer, command: list[str]) -> None:
    code, stdout, stderr = coserve(*command, "--base-url", server.base_url)
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"coserve: HTTP 404: {server.base_url}/v1/batches")
    assert "is that the address of the server?" in stderr


def test_why_of_what_is_no_server_of_ours_and_of_none(server: FaultServer) -> None:
    flags = ("--base-url", server.base_url)
    code, stdout, stderr = coserve("why", "a/1", *flags)
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"coserve: HTTP 404: {server.base_url}/coserve/steps/a%2F1")
    server._portal.call(server.die_here)
    code, stdout, stderr = coserve("why", "a/1", *flags)
    assert (code, stdout) == (3, "")
    assert "is the server there?" in stderr


def test_a_server_that_is_gone(server: FaultServer, source: Path, output: Path) -> None:
    server.on_request = lambda count: server.die_here() if count == 20 else None
    flags = ["--retry-for", "0.2", "--concurrency", "4"]
    code, stdout, stderr = submit(source, output, server.base_url, *flags)
    assert code == 3
    assert "failed: " in stdout
    assert "run the same command again to continue" in stdout
    assert stderr.startswith(f"coserve: nothing new has come from {server.base_url} for 0.2 s")
    finished = len(results_by_line(output))
    assert 0 < finished < 20
    code, summary = submit_json(source, output, server.base_url, *flags)
    assert (code, summary["state"], summary["ok"]) == (3, "failed", finished)
    assert "is the server there?" in summary["error"]
    server.come_back()
    code, summary = submit_json(source, output, server.base_url, *flags)
    assert (code, summary["ok"], summary["resumed"]) == (0, 40, finished)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_cleanly_and_the_next_run_continues(
    server: FaultServer, source: Path, output: Path, number: signal.Signals, code: int
) -> None:
    def stop_at_the_20th(count: int) -> None:
        if count == 20:
            process.send_signal(number)

    server.on_request = stop_at_the_20th
    lines = [line(f"id-{n}", faults=["slow 0.02"]) for n in range(1, 41)]
    write_lines(source, lines)
    process = start_submit(source, output, server.base_url, "--concurrency", "4")
    ended_with, stdout, stderr = end(process)
    assert (ended_with, stderr) == (code, "")
    assert stdout.startswith("cancelled: ")
    assert "run the same command again to continue" in stdout
    finished = len(results_by_line(output))
    assert 0 < finished < 40
    ended_with, summary = submit_json(source, output, server.base_url)
    assert (ended_with, summary["ok"], summary["resumed"]) == (0, 40, finished)


def test_killed_runs_add_up_to_one_record_per_line(
    server: FaultServer, source: Path, output: Path
) -> None:
    rng = random.Random(1)
    lines = [line(f"id-{n}", faults=["slow 0.05"]) for n in range(1, 401)]
    for bad in rng.sample(range(400), 40):
        lines[bad] = line(f"bad-{bad}", faults_forever="400")
    write_lines(source, lines)

    for _ in range(10):
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


def test_a_terminal_shows_a_bar(server: FaultServer, source: Path, output: Path) -> None:
    write_lines(source, [line("quick"), line("slow", faults=["slow 5"])])
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "submit", str(source), "-o", str(output), "--base-url", server.base_url],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=environment() | {"TERM": "xterm"},
    )
    os.close(terminal)
    shown = ""
    with suppress(OSError):  # The end of what is shown.
        while piece := os.read(screen, 4096):
            shown += piece.decode(errors="replace")
    os.close(screen)
    process.communicate(timeout=PROCESS_TIMEOUT_S)
    assert process.returncode == 0
    assert "\x1b[" in shown
    assert "%" in shown


def test_the_api_key_comes_from_the_environment(
    server: FaultServer, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(source, [line("a")])
    for variables in (
        {"OPENAI_API_KEY": "openai"},
        {"OPENAI_API_KEY": "openai", "COSERVE_API_KEY": "coserve"},
    ):
        output.unlink(missing_ok=True)
        subprocess.run(
            [*COMMAND, "submit", str(source), "-o", str(output)],
            env=environment() | variables | {"COSERVE_BASE_URL": server.base_url + "/v1/"},
            timeout=PROCESS_TIMEOUT_S,
            check=True,
            capture_output=True,
        )
    assert server.authorization == ["Bearer openai", "Bearer coserve"]
    assert set(server.paths) == {"/v1/completions"}


def test_the_versions() -> None:
    code, stdout, _ = coserve("version")
    assert code == 0
    assert stdout.startswith(f"coserve {__version__}, sglang ")


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from sglang_coserve.cli import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'sglang', 'httpx2', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=PROCESS_TIMEOUT_S, check=True)
