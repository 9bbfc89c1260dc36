"""A server without its engine ends, instead of taking requests in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil
import pytest

from sglang_coserve.local_server import LocalServer
from started_processes import engine_processes, is_alive

NUM_CLIENTS = 8
END_TIMEOUT_S = 40
"""Less than the 65 s for which SGLang writes down a GPU's memory, were there one."""


def flags_for(model: Path) -> list[str]:
    """Flags of a server that starts soon."""
    settings = ("--dtype", "float32", "--startup-profile-seconds", "0")
    return ["--model-path", str(model), *settings]


@pytest.mark.parametrize(
    # The chaos test does the other, and waits for the same end.
    "name",
    ["detokenizer", pytest.param("scheduler", marks=pytest.mark.heavy)],
)
def test_the_server_ends_with_any_of_its_processes(
    small_model: Path, tmp_path: Path, name: str
) -> None:
    with LocalServer(flags_for(small_model), log_path=tmp_path / "server.log") as server:
        leader = psutil.Process(server.pid)
        children = leader.children(recursive=True)
        (lost,) = engine_processes(server, name)
        lost.kill()
        _, alive = psutil.wait_procs([leader, *children], timeout=END_TIMEOUT_S)
        assert alive == [], (tmp_path / "server.log").read_text()[-2000:]


class TerminalServer(LocalServer):
    """A server that does not fork from another process: what its imports leave is its own."""

    start_process = subprocess.Popen


@pytest.mark.heavy
def test_ctrl_c_in_a_terminal_ends_it_in_order(small_model: Path, tmp_path: Path) -> None:
    """It reaches all processes of the server at once."""
    log = tmp_path / "server.log"
    with TerminalServer(flags_for(small_model), log_path=log) as server:
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(END_TIMEOUT_S) == 130, log.read_text()[-2000:]
    said = log.read_text()
    assert not [word for word in ("Traceback", "crashed", "leaked") if word in said], said[-2000:]


def test_requests_after_the_end_of_its_engine_do_not_hold_the_server_up(
    small_model: Path, tmp_path: Path
) -> None:
    """They come over connections that are open, as a router keeps them."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    with LocalServer(flags_for(small_model), log_path=tmp_path / "server.log") as server:
        (scheduler,) = engine_processes(server, "scheduler")
        clients = [
            httpx2.Client(base_url=server.base_url, timeout=END_TIMEOUT_S, trust_env=False)
            for _ in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.post("/generate", json=body).raise_for_status()
        os.kill(server.pid, signal.SIGTERM)
        while is_alive(scheduler):
            for client in clients:  # So that no connection is closed as idle.
                with suppress(httpx2.TransportError):
                    health = client.get("/health").status_code
        assert health == 503
        sending = [threading.Thread(target=sent, args=(client, body)) for client in clients]
        for thread in sending:
            thread.start()
        assert server.wait(END_TIMEOUT_S) == 0, (tmp_path / "server.log").read_text()[-2000:]
        for thread in sending:
            thread.join()
        for client in clients:
            client.close()


def sent(client: httpx2.Client, body: dict[str, object]) -> None:
    """Send a request that may get no answer."""
    with suppress(httpx2.TransportError):
        client.post("/generate", json=body)
