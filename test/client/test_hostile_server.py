"""A server whose every word is meant for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from client.coserve_process import coserve
from sglang_coserve.client.progress import JobState, JobStatus, _description, _one_line
from web_server import Call, web_server

EVIL = "\x1b]0;owned\x07\x1b[2J\r\u202e[red]\x9b31m"
BATCH = {
    "id": f"batch_{EVIL}",
    "status": f"in_progress{EVIL}",
    "created_at": 0,
    "expires_at": 0,
    "completion_window": EVIL,
    "request_counts": {"total": EVIL, "completed": 1, "failed": 0},
    "usage": {"total_tokens": EVIL, "input_tokens": 0, "output_tokens": 0},
    "errors": {"data": [{"line": EVIL, "message": EVIL}]},
    "coserve": {"warning": EVIL, "owner": EVIL},
}


def hostile(call: Call) -> None:
    """Answer a batch, a list of them, or a refusal."""
    answers = {"/v1/batches/x": (200, BATCH), "/v1/batches": (200, {"data": [BATCH] * 2})}
    refusal = (400, {"error": {"message": EVIL, "code": EVIL}})
    status, answer = answers.get(call.path.partition("?")[0], refusal)
    call.answer(status, json.dumps(answer).encode())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with web_server(hostile) as server:
        yield server.url


@pytest.mark.parametrize(
    "command", [["status", "x"], ["list"], ["status", "refused"], ["status", "x", "--json"]]
)
def test_it_is_shown_and_not_obeyed(url: str, command: list[str]) -> None:
    _, stdout, stderr = coserve(*command, "--base-url", url)
    shown = stdout + stderr
    assert "[red]" in shown
    assert r"\x1b]0;owned" in shown or r"\u001b]0;owned" in shown
    assert not set(shown) & {"\x1b", "\x07", "\r", "\x9b", "\u202e"}


def test_progress_is_one_line_of_text() -> None:
    status = JobStatus(
        state=JobState.RUNNING,
        ok=1,
        failed=0,
        resumed=0,
        total=2,
        prompt_tokens=1,
        completion_tokens=1,
        elapsed_s=1.0,
        trouble=f"first\nsecond {EVIL}",
        batch_id=EVIL,
        batch_state=EVIL,
    )
    shown = _one_line(_description(status))
    assert "first second" in shown
    assert shown.isprintable()
