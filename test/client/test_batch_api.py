"""The client and the command against a server that has a Batch API."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch.live_app import LiveApp
from batch.scenarios import line, lines
from batch.scripted_backend import ScriptedBackend, answer, failure, name_of
from client.coserve_process import coserve, end, start_submit, submit, submit_json
from sglang_coserve.batch.routes.service import set_not_ready
from sglang_coserve.client import (
    BatchOptions,
    CoserveClient,
    JobState,
    JobStatus,
    read_results,
)
from sglang_coserve.client.submission import Submission, file_digest, submission_path
from sglang_coserve.errors import ConfigError, InputFileError, RequestError, ServerError
from sglang_coserve.lines.backend import LineRequest, LineResult
from waiting import eventually


def answers(request: LineRequest) -> LineResult:
    return failure(400) if name_of(request) == "bad" else answer(request)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApp]:
    data = tmp_path_factory.mktemp("data")
    with LiveApp(data, ScriptedBackend(answers=answers)) as app:
        yield app


@pytest.fixture
def held(app: LiveApp) -> Iterator[LiveApp]:
    """The engine keeps every line until the test is over."""
    app.backend.holds = True
    yield app
    app.backend.holds = False
    app.in_loop(app.backend.finish_all)
    eventually(lambda: not app.backend.in_flight)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(20))
    return path


def at(app: LiveApp) -> list[str]:
    return ["--base-url", app.base_url]


def run(app: LiveApp, source: Path, output: Path, use_batch: bool | None = None) -> JobStatus:
    """Submit a file, and wait for its end."""
    with CoserveClient(app.base_url) as client:
        return client.submit_jsonl(source, output, use_batch=use_batch).wait()


def forget_end(output: Path) -> None:
    """As if the client had been killed before the last results were on the disk."""
    stored = json.loads(submission_path(output).read_text())
    submission_path(output).write_text(json.dumps({**stored, "ended": None}))


def custom_ids(path: Path) -> list[str]:
    return sorted(json.loads(text)["custom_id"] for text in path.read_text().splitlines())


def test_results_come_through_the_servers_batch(app: LiveApp, source: Path, output: Path) -> None:
    source.write_bytes(lines(20) + line("bad").encode())
    with CoserveClient(app.base_url) as client:
        job = client.submit_jsonl(source, output, batch_options=BatchOptions("2h"))
        results = {result.custom_id: result for result in client.results(job)}
        status = job.wait()
    assert (status.state, status.ok, status.failed) == (JobState.COMPLETED, 20, 1)
    assert status.batch_id is not None
    assert status.completion_tokens == 80
    assert len(results) == 21
    assert results["id-7"].text
    assert results["id-7"].line == 7
    bad = results["bad"]
    assert (bad.ok, bad.line) == (False, 21)
    assert (bad.error.code, bad.error.message) == ("http_400", "no")
    assert {result.custom_id for result in read_results(output)} == results.keys()


def test_submitted_again_it_is_the_same_batch(app: LiveApp, source: Path, output: Path) -> None:
    ids = set()
    for _ in range(2):
        ids.add(run(app, source, output).batch_id)
        assert len(custom_ids(output)) == 20
    assert len(ids) == 1


def test_what_a_power_failure_leaves_of_a_download_is_cut_off_and_fetched_again(
    app: LiveApp, source: Path, output: Path
) -> None:
    run(app, source, output)
    content = output.read_bytes()
    middle = len(content) // 2
    for damaged in (
        content[: middle // 2],
        bytes(len(content)),
        content[:middle] + bytes(300) + content[middle + 300 :],
        content[:middle] + bytes(300),
        content[: -len(content.splitlines(keepends=True)[-1])] + bytes(80),
    ):
        output.write_bytes(damaged)
        forget_end(output)
        run(app, source, output)
        assert output.read_bytes() == content


def test_a_download_whose_sync_fails_is_no_result(
    app: LiveApp, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(app, source, output)
    content = output.read_bytes()
    output.write_bytes(content[:100])
    forget_end(output)
    sync, synced = os.fdatasync, []

    def fdatasync(fd: int) -> None:
        # The files of the server are below another directory.
        if Path(f"/proc/self/fd/{fd}").readlink() == output.resolve():
            synced.append(os.fstat(fd).st_size)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(InputFileError, match="Input/output error"):
            run(app, source, output)
    assert synced == [len(content)]
    assert output.read_bytes() == b""
    run(app, source, output)
    assert output.read_bytes() == content


def test_a_changed_input_is_refused(app: LiveApp, source: Path, output: Path) -> None:
    run(app, source, output)
    source.write_bytes(lines(21))
    with pytest.raises(InputFileError, match="has changed"):
        run(app, source, output)


def test_a_malformed_input_is_told_with_its_lines_and_can_be_mended(
    app: LiveApp, source: Path, output: Path
) -> None:
    source.write_bytes(lines(2) + b"{not json\n")
    with pytest.raises(InputFileError, match="line 3: "):
        run(app, source, output)
    source.write_bytes(lines(3))
    assert run(app, source, output).ok == 3


def test_the_client_keeps_the_batch_where_that_is_wanted(
    app: LiveApp, source: Path, output: Path
) -> None:
    # The application has the batch routes alone: lines find nothing there.
    status = run(app, source, output, use_batch=False)
    assert (status.is_local, status.failed) == (True, 20)
    assert run(app, source, output).resumed == 20  # And it is continued like that.
    with pytest.raises(ConfigError, match="kept by this client"):
        run(app, source, output, use_batch=True)


def test_a_server_that_must_have_it(source: Path, output: Path) -> None:
    with LiveApp(None) as app:
        with pytest.raises(ServerError, match="--coserve-data-dir"):
            run(app, source, output, use_batch=True)
        assert run(app, source, output).is_local


def test_two_clients_do_not_fill_one_output(held: LiveApp, source: Path, output: Path) -> None:
    with CoserveClient(held.base_url) as client:
        job = client.submit_jsonl(source, output)
        eventually(lambda: len(held.backend.in_flight) == 20)
        assert job.status.state is JobState.RUNNING
        with pytest.raises(InputFileError, match="another client"):
            client.submit_jsonl(source, output)
        batch_id = job.status.batch_id
        assert batch_id is not None
        code, _, stderr = coserve("results", batch_id, "-o", str(output), *at(held))
        assert (code, "another client" in stderr) == (2, True)


def test_stopping_the_job_leaves_the_batch(held: LiveApp, source: Path, output: Path) -> None:
    process = start_submit(source, output, held.base_url)
    eventually(lambda: len(held.backend.in_flight) == 20)
    eventually(lambda: 'batch_id": "' in (output.with_name("out.batch.json")).read_text())
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = end(process)
    assert (code, stderr) == (130, "")
    assert "coserve cancel batch_" in stdout
    assert len(held.backend.in_flight) == 20
    held.backend.holds = False
    held.in_loop(held.backend.finish_all)
    code, summary = submit_json(source, output, held.base_url)
    assert (code, summary["ok"]) == (0, 20)
    assert len(custom_ids(output)) == 20


def test_a_cancelled_batch_is_not_continued(held: LiveApp, source: Path, output: Path) -> None:
    process = start_submit(source, output, held.base_url)
    eventually(lambda: len(held.backend.in_flight) == 20)
    stored = output.with_name("out.batch.json")
    eventually(lambda: json.loads(stored.read_text())["batch_id"])
    assert coserve("cancel", json.loads(stored.read_text())["batch_id"], *at(held))[0] == 0
    code, stdout, stderr = end(process)
    assert (code, "again to continue" in stdout) == (3, False)
    assert "was cancelled" in stderr and "another output" in stderr


def stored(app: LiveApp) -> set[str]:
    """The ids of all files of who calls without a key."""
    listed = httpx2.get(f"{app.base_url}/v1/files", timeout=60).raise_for_status().json()
    return {file["id"] for file in listed["data"]}


@pytest.mark.parametrize("is_local", [False, True], ids=["server", "here"])
def test_names_that_are_not_utf_8(app: LiveApp, tmp_path: Path, is_local: bool) -> None:
    """As old archives and mounts have them."""
    source, output = (
        tmp_path / os.fsdecode(name) for name in (b"in-\xff.jsonl", b"out-\xff.jsonl")
    )
    source.write_bytes(lines(2))
    flags = ["--no-batch"] if is_local else []
    code, stdout, stderr = submit(source, output, app.base_url, *flags)
    assert (code, stderr) == (1 if is_local else 0, "")  # The application has no other routes.
    assert r"out-\udcff.jsonl" in stdout
    assert len(list(read_results(output))) == 2


def test_inputs_do_not_outlive_their_batches(app: LiveApp, source: Path, output: Path) -> None:
    before = stored(app)
    batch_id = run(app, source, output).batch_id
    code, shown, _ = coserve("status", str(batch_id), "--json", *at(app))
    batch = json.loads(shown)
    assert code == 0 and stored(app) - before == {batch["output_file_id"]}
    listed = httpx2.get(f"{app.base_url}/v1/files/{batch['output_file_id']}", timeout=60).json()
    assert listed["expires_at"] == pytest.approx(batch["completed_at"] + 30 * 86_400, abs=60)

    source.write_bytes(lines(1) + b"{\n")
    with pytest.raises(InputFileError, match="line 2"):
        run(app, source, output.with_name("malformed.jsonl"))
    source.write_bytes(line("x").replace("/v1/completions", "/v1/embeddings").encode())
    with CoserveClient(app.base_url) as client, pytest.raises(RequestError, match="endpoint"):
        client.submit_jsonl(source, output.with_name("refused.jsonl")).wait()
    assert stored(app) - before == {batch["output_file_id"]}

    code, shown, _ = coserve("delete", str(batch_id), *at(app))
    assert (code, shown) == (0, f"deleted {batch['output_file_id']}\n")
    assert stored(app) == before
    code, _, error = coserve("delete", "file-" + "0" * 24, *at(app))
    assert code == 2 and "no such file" in error


def test_a_running_batch_keeps_its_files(held: LiveApp, source: Path) -> None:
    code, batch_id, _ = coserve("submit", str(source), "--quiet", *at(held))
    assert code == 0
    code, _, error = coserve("delete", batch_id.strip(), *at(held))
    assert code == 2 and "cancel it first" in error


@pytest.mark.parametrize(
    "flags", [("--window", "soon"), ("--window", "400d"), ("--priority", "101")]
)
def test_wrong_options_cost_no_upload(source: Path, output: Path, flags: tuple[str, str]) -> None:
    nobody = ("--base-url", "http://127.0.0.1:9", "--retry-for", "60")
    code, _, error = coserve("submit", str(source), "-o", str(output), *nobody, *flags)
    assert code == 2 and flags[1] in error


def test_an_upload_that_has_expired_is_made_again(app: LiveApp, source: Path, output: Path) -> None:
    gone = Submission(file_digest(source), "a key", input_file_id="file-" + "0" * 24)
    submission_path(output).write_text(json.dumps(asdict(gone)))
    assert run(app, source, output).ok == 20


def test_an_interrupted_submission_goes_on_with_its_options_alone(
    held: LiveApp, source: Path, output: Path
) -> None:
    """It was killed between the creation of its batch and the answer."""
    code, _, _ = coserve("submit", str(source), *at(held), "--quiet")
    upload = {"file": source.read_bytes()}
    file = httpx2.post(
        f"{held.base_url}/v1/files", data={"purpose": "batch"}, files=upload, timeout=60
    ).json()
    begun = Submission(file_digest(source), "its key", input_file_id=file["id"])
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "2h",
        "coserve": {"priority": 0},
        "output_expires_after": {"anchor": "created_at", "seconds": 2_592_000},
    }
    key = {"idempotency-key": "its key"}
    httpx2.post(
        f"{held.base_url}/v1/batches", json=body, headers=key, timeout=60
    ).raise_for_status()
    submission_path(output).write_text(json.dumps(asdict(begun)))
    code, _, error = submit(source, output, held.base_url, "--window", "3h")
    assert code == 2
    assert "begun with other options" in error and str(submission_path(output)) in error
    assert file["id"] in stored(held)
    process = start_submit(source, output, held.base_url, "--window", "2h", "--quiet")
    try:
        eventually(lambda: json.loads(submission_path(output).read_text())["batch_id"])
    finally:
        process.send_signal(signal.SIGINT)
        end(process)


@pytest.mark.parametrize("names", [("a", "a.jsonl"), ("a.jsonl", "a")])
def test_two_outputs_have_two_error_files(
    app: LiveApp, source: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    first, second = (tmp_path / name for name in names)
    run(app, source, first)
    with pytest.raises(InputFileError, match=r"a\.errors\.jsonl: choose another"):
        run(app, source, second)
    assert not second.exists()
    assert run(app, source, first).ok == 20
    first.write_bytes(lines(1))  # Not a result.
    run(app, source, second)


def test_a_table_of_requests_becomes_one_of_results(app: LiveApp, tmp_path: Path) -> None:
    source, table = tmp_path / "in.parquet", tmp_path / "out.parquet"
    requests = lines(3) + line("bad").encode()
    pq.write_table(pa.table({"request": requests.decode().splitlines()}), source)
    for _ in range(2):  # The second time everything is there.
        code, stdout, stderr = end(start_submit(source, table, app.base_url))
        assert (code, "3 ok, 1 failed" in stdout) == (1, True), stderr
        rows = {row["custom_id"]: row for row in pq.read_table(table).to_pylist()}
        assert rows.keys() == {"id-1", "id-2", "id-3", "bad"}
        assert rows["bad"]["status_code"] == 400
        assert json.loads(rows["id-1"]["response"])["usage"]
    assert len(custom_ids(tmp_path / "out.jsonl")) == 3
    code, _, stderr = end(start_submit(source, source, app.base_url))
    assert (code, "would overwrite the input" in stderr) == (2, True)
    assert pq.read_table(source).column_names == ["request"]


def test_a_batch_is_left_to_the_server_and_its_results_fetched(
    app: LiveApp, source: Path, output: Path
) -> None:
    server = at(app)
    code, stdout, stderr = coserve("submit", str(source), "--window", "2h", *server)
    assert (code, stderr) == (0, "")
    batch_id = stdout.strip()

    def is_complete() -> bool:
        code, stdout, _ = coserve("status", batch_id, *server, "--json")
        return code == 0 and json.loads(stdout)["status"] == "completed"

    eventually(is_complete)
    code, stdout, _ = coserve("status", batch_id, *server)
    assert code == 0
    assert "completed  20 ok, 0 failed of 20" in stdout
    assert "window 2h" in stdout
    assert batch_id in coserve("list", *server)[1]
    for _ in range(2):
        assert coserve("results", batch_id, "-o", str(output), *server)[0] == 0
        assert len(custom_ids(output)) == 20
    output.write_text("something of mine\n")
    code, _, stderr = coserve("results", batch_id, "-o", str(output), *server)
    assert code == 2
    assert "something else than results of" in stderr
    code, _, stderr = coserve("cancel", batch_id, *server)
    assert code == 2
    assert "409" in stderr


def test_bad_windows_and_ids_are_usage_errors(app: LiveApp, source: Path, output: Path) -> None:
    code, _, stderr = submit(source, output, app.base_url, "--window", "soon")
    assert code == 2
    assert "no duration" in stderr
    source.write_bytes(lines(3))  # Nothing was begun, of which this were another input.
    assert run(app, source, output).ok == 3
    code, _, stderr = coserve("status", "batch_none", "--base-url", app.base_url)
    assert code == 2
    assert "404" in stderr


def test_without_a_batch_api_results_need_a_place(source: Path, output: Path) -> None:
    with LiveApp(None) as app:
        code, _, stderr = coserve("submit", str(source), *at(app))
        assert (code, "add -o" in stderr) == (2, True)
        code, summary = submit_json(source, output, app.base_url, "--window", "2h")
        assert (code, summary["failed"]) == (1, 20)  # Each line gets a 404.


@pytest.mark.parametrize("is_down", [False, True], ids=["not ready", "unreachable"])
def test_a_server_that_starts_is_waited_for(
    source: Path, output: Path, tmp_path: Path, is_down: bool
) -> None:
    """That it does not answer yet does not say that it has no Batch API."""
    with LiveApp(None) as app:
        set_not_ready(app.app, "it is starting")
        port = app.port
        if not is_down:
            process = start_submit(source, output, app.base_url, "--window", "2h")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3)
    if is_down:
        process = start_submit(source, output, app.base_url, "--window", "2h")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
    assert not output.exists()
    with LiveApp(tmp_path / "data", port=port):
        code, stdout, _ = end(process)
    assert (code, "20 ok" in stdout) == (0, True)
    assert 'batch_id": "batch_' in output.with_name("out.batch.json").read_text()
