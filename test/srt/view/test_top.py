"""``coserve top`` on a real server, in a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence

import openai
import pytest

from batch.route_calls import until
from client.coserve_process import COMMAND, PROCESS_TIMEOUT_S, coserve, environment
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, Deployment, create, lines


def top(deployment: Deployment, *flags: str) -> tuple[int, str, str]:
    return coserve("top", "--base-url", deployment.base_url, *flags)


def command(deployment: Deployment) -> Sequence[str]:
    address = ("--base-url", deployment.base_url, "--api-key", API_KEY)
    return [*COMMAND, "top", *address, "--interval", "0.2"]


@pytest.mark.usefixtures("online_load")
def test_one_look_shows_what_the_page_shows(deployment: Deployment, client: openai.OpenAI) -> None:
    batch_id = create(client, lines(2)).id
    until(client, batch_id, "completed")
    code, shown, errors = top(deployment, "--once", "--api-key", API_KEY)
    assert (code, errors) == (0, "")
    for part in ("policy coserve", "ttft p99 <= 400ms", "tokens/s", batch_id, "completed"):
        assert part in shown
    status = ("status", "--base-url", deployment.base_url, "--api-key", API_KEY)
    code, shown, errors = coserve(*status)
    assert (code, errors) == (0, "")
    assert batch_id in shown
    assert json.loads(coserve(*status, "--json")[1])["policy"] == "coserve"
    code, shown, _ = top(deployment, "--once")  # --open-view: without a key, no batches.
    assert code == 0
    assert batch_id not in shown
    code, shown, _ = top(deployment, "--once", "--as-operator", "--api-key", ADMIN_KEY)
    assert code == 0
    assert batch_id in shown


def test_a_pipe_gets_a_line_each_time_and_ctrl_c_ends_it(deployment: Deployment) -> None:
    process = subprocess.Popen(
        command(deployment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    try:
        for _ in range(3):
            line = process.stdout.readline().decode()
            assert re.match(r"\d\d:\d\d:\d\d (ok|harmed|overloaded|unknown), .*offline", line)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PROCESS_TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == b""


def test_a_terminal_gets_tables_and_is_left_as_it_was(deployment: Deployment) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(deployment),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment() | {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"},
        start_new_session=True,
    )
    os.close(follower)
    try:
        seen = read_until(leader, b"tokens/s")
        assert b"\x1b[?25l" in seen  # The cursor is hidden.
        process.send_signal(signal.SIGINT)
        seen = read_until(leader, b"\x1b[?25h")
        assert process.wait(PROCESS_TIMEOUT_S) == 130
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def read_until(descriptor: int, part: bytes) -> bytes:
    seen, give_up_s = b"", time.monotonic() + PROCESS_TIMEOUT_S
    while part not in seen:
        assert time.monotonic() < give_up_s, seen
        if select.select([descriptor], [], [], 1.0)[0]:
            seen += os.read(descriptor, 65_536)
    return seen


def test_who_may_not_look_is_told_how_to(deployment: Deployment) -> None:
    code, _, errors = top(deployment, "--once", "--api-key", "another")
    assert code == 3
    assert "--api-key" in errors
    assert "Traceback" not in errors
