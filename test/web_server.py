"""A web server in a thread of its own, which answers as a test says."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Call(BaseHTTPRequestHandler):
    """A request, and its answer."""

    content = b""

    def answer(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class WebServer:
    url: str
    calls: list[Call] = field(default_factory=list)


@contextmanager
def web_server(
    answer: Callable[[Call], None], context: ssl.SSLContext | None = None
) -> Iterator[WebServer]:
    """Listen on a free port of loopback; ``answer`` is called with each GET and POST."""

    class Handler(Call):
        def do_GET(self) -> None:
            self.content = self.rfile.read(int(self.headers.get("content-length", 0)))
            running.calls.append(self)
            answer(self)

        def do_POST(self) -> None:
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        running = WebServer(f"{scheme}://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()
