"""A server whose every word is meant for the terminal."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from client.coserve_process import coserve
from sglang_coserve.client.progress import JobState, JobStatus, _description, _one_line

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


class Hostile(BaseHTTPRequestHandler):
    """Answers a batch, a list of them, or a refusal."""

    def do_GET(self) -> None:
        answers = {"/v1/batches/x": (200, BATCH), "/v1/batches": (200, {"data": [BATCH] * 2})}
        refusal = (400, {"error": {"message": EVIL, "code": EVIL}})
        status, answer = answers.get(self.path.partition("?")[0], refusal)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


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
        done_bytes=1,
        total_bytes=2,
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
