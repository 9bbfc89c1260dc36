"""The job of docs/fleet.md on a real engine, killed in the middle and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batch.scenarios import line
from sglang_coserve.local_server import LocalServer
from waiting import eventually

pytest.importorskip("ray")
import psutil
import pyarrow.parquet as pq

pytestmark = pytest.mark.heavy

ADMIN_KEY = "the engine's admin key"
MAX_TOKENS = 2
GIVE_UP_S = 400
JOB_S = {500: GIVE_UP_S, 10_000: 3600}
"""How long a job of so many lines may take."""


@pytest.fixture(scope="module")
def engine(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[LocalServer]:
    flags = ["--model-path", str(small_model), "--dtype", "float32", "--admin-api-key", ADMIN_KEY]
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    server = LocalServer(
        [*flags, "--startup-profile-seconds", "0"],
        log_path=log,
        ready_timeout_s=GIVE_UP_S,
        # Ray's processes share the cores.
        extra_env={"OMP_NUM_THREADS": "1"},
    )
    with server:
        yield server


def requests(num_lines: int) -> str:
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [line(f"id-{number}", **fields) for number in range(num_lines)]
    lines[17] = '{"custom_id": "cut off", '
    lines[230] = lines[230].replace("completions", "embeddings")
    lines[231] = lines[231].replace(f'"max_tokens": {MAX_TOKENS}', '"max_tokens": "many"')
    return "\n".join(lines) + "\n"


def job_of_docs(directory: Path, engine: LocalServer) -> Path:
    """The job as docs/fleet.md has it, with this test's paths, engine and logical CPUs."""
    docs = Path(__file__).parents[2] / "docs" / "fleet.md"
    blocks = re.findall(r"```python\n(.*?)```", docs.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "sglang_coserve.ray" in block]
    for said, here in (
        ("/shared/", f"{directory}/"),
        ('["http://gpu-1:30001", "http://gpu-2:30001"]', f'["{engine.base_url}"]'),
        ("ray.init()", "ray.init(num_cpus=2, include_dashboard=False)"),
    ):
        assert said in code
        code = code.replace(said, here)
    job = directory / "job.py"
    job.write_text(code)
    return job


@contextmanager
def running(job: Path) -> Generator[subprocess.Popen[bytes]]:
    """A job, which leaves no process behind."""
    environment = {
        **os.environ,
        "COSERVE_ENGINE_ADMIN_KEY": ADMIN_KEY,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Short: the names of Ray's sockets begin with it, and may have 107 bytes.
        "RAY_TMPDIR": "/tmp",
    }
    with (job.parent / "job.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(job)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    started = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            children = started.children(recursive=True)
        for each in children:
            each.kill() if each.is_running() else None
        process.kill()
        process.wait(GIVE_UP_S)
        psutil.wait_procs(children, GIVE_UP_S)


def written(results: Path) -> set[Path]:
    return set(results.glob("*.parquet"))


def noted_files(directory: Path) -> dict[Path, int]:
    """The files of results whose lines Ray has noted as done, and when they were written."""
    noted = {path.stem for path in (directory / "progress").glob("*.parquet")}
    files = written(directory / "results")
    return {f: f.stat().st_mtime_ns for f in files if any(f.name.startswith(n) for n in noted)}


@pytest.mark.parametrize("num_lines", [500, 10_000])
def test_the_job_of_the_docs_goes_on_after_kill_9(
    engine: LocalServer, tmp_path: Path, num_lines: int
) -> None:
    (tmp_path / "requests.jsonl").write_text(requests(num_lines))
    job, results = job_of_docs(tmp_path, engine), tmp_path / "results"
    log = tmp_path / "job.log"
    with running(job) as first:
        eventually(lambda: written(results) or first.poll() is not None, GIVE_UP_S)
        assert first.poll() is None, log.read_text()[-3000:]
        os.kill(first.pid, signal.SIGKILL)
        first.wait(GIVE_UP_S)
    noted = noted_files(tmp_path)
    with running(job) as second:
        assert second.wait(JOB_S[num_lines]) == 0, log.read_text()[-3000:]
    assert noted.items() <= noted_files(tmp_path).items()

    rows = {row["line"]: row for row in pq.read_table(results).to_pylist()}
    assert pq.read_table(results).num_rows == len(rows) == num_lines
    assert rows.keys() == {f"{tmp_path}/requests.jsonl:{n + 1}" for n in range(num_lines)}
    failed = {name.rpartition(":")[2]: row for name, row in rows.items() if row["error"]}
    assert failed.keys() == {"18", "231", "232"}
    assert "JSON" in failed["18"]["error"] and failed["18"]["response"] is None
    assert "does not serve /v1/embeddings" in failed["231"]["error"]
    assert failed["232"]["error"].startswith("HTTP 400: ") and failed["232"]["status_code"] == 400
    for name, row in rows.items():
        if name.rpartition(":")[2] not in failed:
            assert row["custom_id"] == f"id-{int(name.rpartition(':')[2]) - 1}"
            usage = json.loads(row["response"])["usage"]
            assert usage["completion_tokens"] == MAX_TOKENS
