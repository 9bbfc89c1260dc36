"""A batch that the client keeps in a directory, through kills, refusals and second clients."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from batch.scenarios import line
from client.batch_files import results_by_line, write_lines
from client.coserve_process import end, start_submit, submit, submit_json
from client.fault_server import FaultServer
from sglang_coserve.client import (
    AsyncJob,
    Batch,
    BatchApi,
    BatchOptions,
    ClientOptions,
    CoserveClient,
    JobState,
    RetryPolicy,
)
from sglang_coserve.client.batch_api import batch_of
from sglang_coserve.client.line_server import LineServer
from sglang_coserve.client.local_batches import LocalBatchApi, open_local_batches
from sglang_coserve.client.submission import data_directory, submission_path
from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.lines.background import Clock
from waiting import eventually


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [line(f"id-{n}") for n in range(1, 21)])


def leave_unfinished(
    server: FaultServer, source: Path, output: Path, options: BatchOptions | None = None
) -> None:
    """Submit one line, and close the client once the server has the line."""
    write_lines(source, [line("a", faults=["hang"])])
    with CoserveClient(server.base_url) as client:
        client.submit_jsonl(source, output, batch_options=options)
        eventually(lambda: server.bodies)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_directory_is_there_for_as_long_as_the_batch_runs(
    server: FaultServer, source: Path, output: Path, tmp_path: Path
) -> None:
    write_lines(source, [line("a"), line("b", faults=["hang"])])
    process = start_submit(source, output, server.base_url)
    eventually(lambda: len(server.bodies) == 2)
    try:
        assert data_directory(output).stat().st_mode & 0o777 == 0o700
        code, _, stderr = submit(source, output, server.base_url)
        assert (code, "being written by another client" in stderr) == (2, True)
    finally:
        process.send_signal(signal.SIGINT)
        assert end(process)[0] == 130
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.batch.json", "out.jsonl.coserve"}
    code, summary = submit_json(source, output, server.base_url)
    assert (code, summary["ok"], summary["batch_state"]) == (0, 2, "completed")
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.batch.json"}
    assert sorted(results_by_line(output)) == [1, 2]
    # Nothing is asked any more, not even whether the server is there.
    server._portal.call(server.die_here)
    code, summary = submit_json(source, output, server.base_url, "--retry-for", "0.1")
    assert (code, summary["ok"], summary["resumed"]) == (0, 2, 2)
    assert (summary["prompt_tokens"], summary["tokens_per_s"]) == (0, 0.0)


def test_a_stopped_batch_goes_on_though_the_input_has_gone(
    server: FaultServer, source: Path, output: Path
) -> None:
    """A copy is kept with the batch: nothing that is served can have changed."""
    write_lines(source, [line("a", faults=["hang"])])
    with CoserveClient(server.base_url) as client:
        job = client.submit_jsonl(source, output)
        eventually(lambda: server.bodies)
    assert job.status.state is JobState.CANCELLED
    content = source.read_bytes()
    source.write_bytes(content + line("b").encode())
    with CoserveClient(server.base_url) as client:
        with pytest.raises(InputFileError, match="the input has changed"):
            client.submit_jsonl(source, output).wait()
        source.write_bytes(content)
        assert client.submit_jsonl(source, output).wait().ok == 1


def test_a_closed_window_leaves_records(server: FaultServer, source: Path, output: Path) -> None:
    write_lines(source, [line("a"), line("b", faults=["hang"])])
    with CoserveClient(server.base_url) as client:
        job = client.submit_jsonl(source, output, batch_options=BatchOptions("2s", 1))
        status = job.wait()
    assert (status.batch_state, status.ok, status.failed) == ("expired", 1, 1)
    (late,) = [result for result in results_by_line(output).values() if not result.ok]
    assert late.error and late.error.code == "batch_expired"
    assert not data_directory(output).exists()


def test_a_kill_between_creation_and_answer_is_no_dead_end(
    server: FaultServer, source: Path, output: Path
) -> None:
    leave_unfinished(server, source, output, BatchOptions("2h"))
    stored = submission_path(output).read_text()
    begun = stored.partition('"batch_id"')[0] + '"batch_id": null, "is_local": true}'
    submission_path(output).write_text(begun)
    with CoserveClient(server.base_url) as client:
        with pytest.raises(ConfigError, match="begun with other options") as caught:
            client.submit_jsonl(source, output, batch_options=BatchOptions("3h")).wait()
        assert str(submission_path(output)) in str(caught.value)
        submission_path(output).unlink()
        job = client.submit_jsonl(source, output, batch_options=BatchOptions("3h"))
        assert job.wait().ok == 1


def test_a_directory_that_cannot_be_used_is_named(
    server: FaultServer, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with CoserveClient(server.base_url) as client, monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        with pytest.raises(InputFileError, match=r"cannot be kept in .*coserve: .*No space left"):
            client.submit_jsonl(source, output).wait()
    with CoserveClient(server.base_url) as client:
        assert client.submit_jsonl(source, output).wait().ok == 20


def test_an_output_that_would_overwrite_the_input(
    server: FaultServer, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.errors.jsonl").hardlink_to(source)
    with CoserveClient(server.base_url) as client:
        for output in (source, tmp_path / "x.jsonl"):
            with pytest.raises(InputFileError, match="would overwrite the input"):
                client.submit_jsonl(source, output)


def test_modes_that_a_mount_does_not_have_are_a_warning(
    server: FaultServer, source: Path, output: Path
) -> None:
    """As on vfat or SMB, where no chmod would help."""
    leave_unfinished(server, source, output)
    directory = data_directory(output)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o777)
    code, stdout, stderr = submit(source, output, server.base_url)
    assert (code, "1 ok" in stdout) == (0, True)
    (warning,) = stderr.splitlines()
    assert warning.startswith(f"{directory} holds prompts and answers, and others")


def test_a_directory_that_cannot_be_used_is_told_in_the_words_of_the_command(
    server: FaultServer, source: Path, output: Path
) -> None:
    leave_unfinished(server, source, output)
    database = data_directory(output) / "coserve.sqlite"
    database.write_bytes(b"nonsense" * 1000)
    with (
        CoserveClient(server.base_url) as client,
        pytest.raises(InputFileError, match="or choose another output") as caught,
    ):
        client.submit_jsonl(source, output).wait()
    assert "data-dir" not in str(caught.value) and "this server" not in str(caught.value)


IMPATIENT = ClientOptions(retry_policy=RetryPolicy(retry_for_s=0.5))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes of every disk are free."""
    found = shutil.disk_usage("/")

    def is_free(size_bytes: int) -> None:
        usage = found._replace(free=size_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    return is_free


def test_lines_are_not_sent_while_there_is_no_room_for_their_answers(
    server: FaultServer, source: Path, output: Path, free: Callable[[int], None]
) -> None:
    write_lines(source, [line("a"), *(line(f"b-{n}", faults=["slow 0.2"]) for n in range(8))])
    server.on_request = lambda count: free(4 << 20) if count == 5 else None
    options = ClientOptions(concurrency=2, retry_policy=RetryPolicy(retry_for_s=0.5))
    with CoserveClient(server.base_url, options=options) as client:
        with pytest.raises(InputFileError, match=r"stood still for 0.5 s: the disk of .* is full"):
            client.submit_jsonl(source, output).wait()
        sent = server.prompts()
        # None is answered twice: all that were sent are here.
        answered = {result.custom_id for result in results_by_line(output).values()}
        assert answered == sent.keys()
        assert 5 <= len(answered) <= 6
        free(1 << 40)
        assert client.submit_jsonl(source, output).wait().ok == 9
    assert set(server.prompts().values()) == {1}


def test_an_input_that_somebody_has_changed_in_the_directory_stops_the_run(
    server: FaultServer, source: Path, output: Path
) -> None:
    write_lines(source, [line("a"), line("b", faults=["hang"])])
    with CoserveClient(server.base_url) as client:
        client.submit_jsonl(source, output)
        eventually(lambda: len(server.bodies) == 2)
    (kept,) = (
        path
        for path in (data_directory(output) / "files").iterdir()
        if path.read_bytes() == source.read_bytes()
    )
    kept.write_bytes(b"")
    with CoserveClient(server.base_url, options=IMPATIENT) as client:
        with pytest.raises(InputFileError, match=r"stood still for 0.5 s: .* has changed"):
            client.submit_jsonl(source, output).wait()
        kept.write_bytes(source.read_bytes())
        assert client.submit_jsonl(source, output).wait().ok == 2


def test_a_full_disk_of_this_machine_is_no_fault_of_the_server(
    server: FaultServer, source: Path, output: Path, free: Callable[[int], None]
) -> None:
    with CoserveClient(server.base_url) as client:
        free(4 << 20)
        with pytest.raises(InputFileError, match=r"cannot be kept in .*coserve: the disk of"):
            client.submit_jsonl(source, output).wait()
        free(20 << 20)  # Less than a server takes.
        assert client.submit_jsonl(source, output).wait().ok == 20


async def test_results_that_nobody_has_fetched_do_not_expire(
    server: FaultServer, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, options = data_directory(output), ClientOptions()

    def backend() -> LineServer:
        return LineServer(server.base_url, None, options, asyncio.Semaphore(8), directory)

    async with open_local_batches(directory, backend(), options) as api:
        file_id = await api.upload(source)
        batch = await api.create(file_id, "/v1/completions", "2h", "key", {})
        while batch["status"] != "completed":
            await asyncio.sleep(0.01)
            batch = await api.retrieve(batch["id"])
    now_s = Clock.now_s
    monkeypatch.setattr(Clock, "now_s", lambda self: now_s(self) + 365 * 86_400)
    async with open_local_batches(directory, backend(), options) as api:
        assert isinstance(api, LocalBatchApi)
        context = api._service.context
        await context.delete_old(context.limits.batch_retention_s, are_responses=False)
        assert await api.retrieve(batch["id"]) == batch
        await api.fetch(batch["output_file_id"], output)
        assert await api.has_file(file_id)
    assert len(results_by_line(output)) == 20


def test_paths_are_those_of_the_call(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", [line("a", faults=["slow 0.1"])])
    monkeypatch.chdir(tmp_path)
    with CoserveClient(server.base_url) as client:
        job = client.submit_jsonl("in.jsonl", "out.jsonl")
        monkeypatch.chdir("/")
        assert job.wait().ok == 1
        assert len(list(client.results(job))) == 1
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.batch.json"}


def test_a_batch_that_is_refused_at_once_leaves_nothing(
    server: FaultServer, source: Path, output: Path, tmp_path: Path
) -> None:
    source.write_text(line("a").replace("/v1/completions", "/v1/elsewhere"))
    code, stdout, stderr = submit(source, output, server.base_url)
    assert (code, "endpoint must be one of" in stderr) == (2, True)
    assert "again to continue" not in stdout
    assert names(tmp_path) == {"in.jsonl", "out.jsonl"}


def test_a_kill_during_the_removal_of_a_refused_batch_is_no_dead_end(
    server: FaultServer,
    source: Path,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = source.read_bytes()
    source.write_bytes(good + b"{")

    def killed(path: Path, **_: object) -> None:
        (path / "lock").unlink(missing_ok=True)

    with CoserveClient(server.base_url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", killed)
            with pytest.raises(InputFileError, match="line 21"):
                client.submit_jsonl(source, output).wait()
        source.write_bytes(good)
        assert client.submit_jsonl(source, output).wait().ok == 20
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.batch.json"}


def test_the_same_command_is_advised_where_it_helps(
    server: FaultServer, source: Path, output: Path
) -> None:
    write_lines(source, [line("a", faults_forever="503")])
    flags = ("--retry-for", "0.2")
    advice = "run the same command again to continue"
    code, stdout, _ = submit(source, output, server.base_url, *flags)
    assert (code, advice in stdout) == (3, True)
    code, stdout, stderr = submit(source, output, server.base_url, *flags, "--priority", "1")
    assert (code, advice in stdout, "was begun with" in stderr) == (2, False, True)
    content = source.read_bytes()
    write_lines(source, [line("b")])
    code, stdout, stderr = submit(source, output, server.base_url, *flags)
    assert (code, advice in stdout, "the input has changed" in stderr) == (2, False, True)
    source.write_bytes(content)
    assert data_directory(output).exists()


RECORD = b'{"id":"batch_req_1_1","custom_id":"a","response":null,"error":null}\n'


class _FailedAtItsEnd(BatchApi):
    """Has a batch whose disk has failed after its window, with a record."""

    def __init__(self) -> None:
        super().__init__("http://a:1", None, RetryPolicy())

    async def upload(self, source: Path) -> str:
        return source.name

    async def create(self, *_: object) -> Batch:
        return await self.retrieve("batch_1")

    async def retrieve(self, batch_id: str) -> Batch:
        faults = [{"message": "the disk failed"}]
        counts = {"total": 2, "completed": 1, "failed": 0}
        status = {"id": batch_id, "status": "failed", "errors": {"data": faults}}
        return batch_of({**status, "request_counts": counts, "output_file_id": "file-1"})

    async def fetch(self, _file_id: str, path: Path) -> None:
        path.write_bytes(RECORD)

    async def delete(self, file_id: str) -> None:
        pass


async def test_a_batch_that_has_failed_with_records_keeps_them(source: Path, output: Path) -> None:
    for _ in range(2):
        opened = nullcontext(_FailedAtItsEnd())
        job = AsyncJob(source, output, opened, BatchOptions(), is_local=True)
        with pytest.raises(InputFileError, match=r"batch_1 has failed; what it had .*\n.*disk"):
            await job.wait()
        assert not job.can_continue
        assert output.read_bytes() == RECORD
