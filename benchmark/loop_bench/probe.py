"""Latencies of /health and gaps of an online stream; a program of its own, for a clock of its own.

``python probe.py HOST PORT SECONDS`` prints ``{"health_ms": […], "gap_ms": […]}``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.client import HTTPConnection
from typing import Final

PERIOD_S: Final = 0.01
STREAM: Final = {
    "input_ids": [100, 200, 300],
    "sampling_params": {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True},
    "stream": True,
}
GIVE_UP_S: Final = 120.0


def ask_health(host: str, port: int, until_s: float, found_ms: list[float]) -> None:
    """Ask again and again."""
    connection = HTTPConnection(host, port, timeout=GIVE_UP_S)
    while time.perf_counter() < until_s:
        began_s = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        found_ms.append((time.perf_counter() - began_s) * 1e3)
        time.sleep(PERIOD_S)


def read_streams(host: str, port: int, until_s: float, found_ms: list[float]) -> None:
    """Read one stream after another, each from its second token on."""
    body = json.dumps(STREAM)
    while time.perf_counter() < until_s:
        connection = HTTPConnection(host, port, timeout=GIVE_UP_S)
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        last_s: float | None = None
        while (line := answer.readline()) and time.perf_counter() < until_s:
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if last_s is not None:
                    found_ms.append((now_s - last_s) * 1e3)
                last_s = now_s
        connection.close()


def main(host: str, port: str, seconds: str) -> None:
    """Probe and print."""
    until_s = time.perf_counter() + float(seconds)
    health_ms: list[float] = []
    gap_ms: list[float] = []
    threads = [
        threading.Thread(target=probe, args=(host, int(port), until_s, found))
        for probe, found in ((ask_health, health_ms), (read_streams, gap_ms))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"health_ms": health_ms, "gap_ms": gap_ms}))


if __name__ == "__main__":
    main(*sys.argv[1:])
