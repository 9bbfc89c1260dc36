"""The demo on the real server: its report, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batch.scenarios import line, lines
from forked_processes import ForkedServers
from started_processes import is_alive, processes_of
from waiting import eventually

TIMEOUT_S = 240


COMMAND = (sys.executable, "-m", "sglang_coserve.demo", "--out")


class Demo:
    """A run of it."""

    def __init__(self, servers: ForkedServers, out: Path, *arguments: str) -> None:
        self._log = out.with_suffix(".log")
        with self._log.open("wb") as log:
            command = [*COMMAND, str(out), *arguments]
            self._process = servers.start(command, env={**os.environ}, stdout=log)
        self.pid: int = self._process.pid

    def output(self) -> str:
        """What it has said so far."""
        return self._log.read_text()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ended(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
        """Its status, and what it has said."""
        return self._process.wait(timeout_s), self.output()


TRACE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:00:00.0000000,60,12\n"
    "2023-11-16 18:00:01.5000000,120,8\n"
    "2023-11-16 18:00:02.0000000,5000,9\n"  # Longer than the context: cut.
    "2023-11-16 18:01:00.0000000,50,8\n"  # After the end.
)


@pytest.fixture
def inputs(tmp_path: Path, small_model: Path) -> tuple[str, ...]:
    """A trace of three requests in the first seconds, and five lines, of which one is malformed."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    offline = tmp_path / "offline.jsonl"
    body = {"model": "default", "max_tokens": 8}
    bad = line("bad", **body, temperature=-1).encode()
    offline.write_bytes(lines(3, **body) + bad + b"\n" + lines(1, "last", **body))
    files = ("--trace", str(trace), "--offline", str(offline))
    return (*files, "--model", str(small_model))


def test_three_systems_are_given_the_same_and_compared(
    forked_servers: ForkedServers, tmp_path: Path, inputs: tuple[str, ...]
) -> None:
    out = tmp_path / "report"
    flags = ("--seconds", "9", "--slo-ttft-ms", "60000")
    demo = Demo(forked_servers, out, *flags, *inputs)
    status, output = demo.ended(2 * TIMEOUT_S)
    assert status == 0, output
    report = json.loads((out / "report.json").read_text())
    systems = report["systems"]
    assert [*systems] == ["online_alone", "stock", "coserve"]
    for name, system in systems.items():
        assert system["online"]["n"] == 3
        for latency in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert system["online"][latency].keys() == {"mean", "p50", "p99", "max"}
        roles = {"scheduler", "http_server", "detokenizer", "client", "other_programs"}
        assert system["cores"].keys() == roles
        if name == "online_alone":
            assert system["offline"] is None
        else:
            assert system["offline"]["failed"] > 0  # One line of five.
    assert systems["online_alone"]["online"]["finished"] == 3
    assert report["online"]["slo"]["ttft_ms"] == 60_000
    assert report["online"] == systems["coserve"]["online"]
    assert report["offline"] == systems["coserve"]["offline"]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    text = re.sub(r"\s+", " ", output)
    assert "1 cut to 1016 tokens" in text
    assert report["sentence"] in text
    assert re.search(r"http://127\.0\.0\.1:\d+/coserve", text)
    # Nothing that other libraries say: their logs and their bars.
    assert not re.search(r"\d\d:\d\d:\d\d\]|it/s|Warning|%\|", output)
    assert not processes_of(out)


@pytest.mark.heavy
def test_an_emulated_gpu_is_compared_the_same_way(
    forked_servers: ForkedServers, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    demo = Demo(forked_servers, out, "--emulate", "h100", "--seconds", "30")
    status, output = demo.ended(2 * TIMEOUT_S)
    assert status == 0, output
    report = json.loads((out / "report.json").read_text())
    name = "emulated-llama-3.1-8b-h100"
    assert report["emulated"] == name
    systems = report["systems"]
    assert [*systems] == ["online_alone", "stock", "coserve"]
    for system in systems.values():
        # The H100's datasheet: its memory takes 4.8 ms to read the weights, and steps can only
        # be slower.
        assert system["online"]["itl_ms"]["p50"] > 4.8
        assert system["online"]["finished"] > 0
    for system in ("stock", "coserve"):
        assert systems[system]["offline"]["ok"] > 0
        assert systems[system]["offline"]["failed"] == 0
        # The machine may be slow, but not faster than the GPU that it stands for.
        assert systems[system]["offline"]["tokens_per_s"] < 100_000
    text = re.sub(r"\s+", " ", output)
    assert report["sentence"].startswith(f"{name}, no GPU: ")
    assert report["sentence"] in text
    assert text.count(f"{name}, no GPU") == 2  # Of the table and of the sentence.
    assert not processes_of(out)


@pytest.mark.parametrize(
    # Both do the same.
    "signum",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.heavy)],
)
def test_an_interrupted_demo_leaves_no_process_behind(
    forked_servers: ForkedServers, tmp_path: Path, small_model: Path, signum: signal.Signals
) -> None:
    out = tmp_path / "report"
    flags = ("--quick", "--seconds", "180", "--model", str(small_model))
    demo = Demo(forked_servers, out, *flags)

    def has_started() -> bool:
        assert not demo.has_ended(), demo.output()
        return "/coserve" in demo.output()

    # It says where the server is when that is up, and sends soon after.
    eventually(has_started, TIMEOUT_S)
    started = processes_of(out)
    # The demo, the HTTP server, the scheduler, the detokenizer.
    assert len({p.pid for p in started}) >= 4
    os.kill(demo.pid, signum)
    status, output = demo.ended(60)
    assert status == 130, output
    assert not [p for p in started if is_alive(p)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace", "none.csv"), "none.csv"),
        (("--emulate", "h1000"), "h1000"),
        (("--emulate", "h100", "--model", "mine"), "remove --model"),
        (("--model", "none"), "none/config.json: No such file or directory; name a path"),
        (("--model", "pictures"), "pictures/config.json has no max_position_embeddings"),
        (("--out", "/dev/null/x"), "/dev/null/x: Not a directory; name a path of directories"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "config.json").write_text('{"text_config": {}}')
    command = [*COMMAND, "report", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
