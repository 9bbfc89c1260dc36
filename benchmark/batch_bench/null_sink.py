"""A server that reads uploads and drops them, as cheaply as it can be done.

As a program it prints its port, answers every request once it has read
all of it, and ends with stdin. What an upload to it costs, the client and the loopback cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Final, Self

import httpx
import openai

__all__ = ["NullSink", "lowest_priority"]

_BUFFER_BYTES: Final = 1 << 18
_CALL_TIMEOUT_S: Final = 600.0
_LOWEST_NICE: Final = 19


def lowest_priority() -> None:
    """Let the calling thread run only when nothing else wants to, as far as the system can."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_NICE)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class NullSink:
    """The server as a child process, and OpenAI's client of it."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # As the benchmark's servers, it ends with the benchmark and not before.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(trust_env=False, timeout=_CALL_TIMEOUT_S),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self._process.kill()
        self._process.communicate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        left_bytes = int(self.headers["content-length"])
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while left_bytes > 0:
            count = self.rfile.readinto(buffer[: min(left_bytes, _BUFFER_BYTES)])
            if not count:
                return
            left_bytes -= count
        answer = json.dumps({"id": "file-null"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until stdin is closed."""
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


def _serve(server: HTTPServer) -> None:
    lowest_priority()
    server.serve_forever()


if __name__ == "__main__":
    main()
