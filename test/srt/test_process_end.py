"""A server that has lost one of its processes ends, instead of taking requests in vain."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_coserve.local_server import LocalServer

END_TIMEOUT_S = 40
"""Less than the 65 s for which SGLang writes down a GPU's memory, were there one."""


@pytest.mark.parametrize(
    # The chaos test does the other, and waits for the same end.
    "name",
    ["sglang::detokenizer", pytest.param("sglang::scheduler", marks=pytest.mark.heavy)],
)
def test_the_server_ends_with_any_of_its_processes(
    small_model: Path, tmp_path: Path, name: str
) -> None:
    flags = ["--model-path", str(small_model), "--dtype", "float32", "--offline-policy", "fifo"]
    with LocalServer(flags, log_path=tmp_path / "server.log") as server:
        leader = psutil.Process(server.pid)
        children = leader.children(recursive=True)
        (lost,) = [child for child in children if child.cmdline()[:1] == [name]]
        lost.kill()
        _, alive = psutil.wait_procs([leader, *children], timeout=END_TIMEOUT_S)
        assert alive == [], (tmp_path / "server.log").read_text()[-2000:]
