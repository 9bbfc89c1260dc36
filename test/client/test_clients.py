"""The two clients: submitting, following and reading results."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import weakref
from base64 import b64encode
from contextlib import suppress
from pathlib import Path

import pytest

from batch.scenarios import line
from certificates import own_authority
from client.batch_files import write_lines
from client.fault_server import FaultServer
from sglang_coserve.bench_serving.one_run import make_ready
from sglang_coserve.client import (
    AsyncCoserveClient,
    AsyncJob,
    Batch,
    BatchApi,
    ClientOptions,
    CoserveClient,
    JobState,
    RetryPolicy,
    read_results,
)
from sglang_coserve.client.local_batches import LocalBatchApi
from sglang_coserve.errors import (
    ConfigError,
    InputFileError,
    RequestError,
    ServerError,
    ServerGoneError,
)
from waiting import GIVE_UP_S
from web_server import web_server

IMPATIENT = ClientOptions(retry_policy=RetryPolicy(retry_for_s=0.1, first_delay_s=0.01))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "in.jsonl",
        [line("a"), line("b", faults=["400"]), *(line(f"id-{n}") for n in range(51))],
    )


def test_results_are_there_before_the_job_ends(
    server: FaultServer, source: Path, output: Path
) -> None:
    write_lines(source, [line("quick"), line("endless", faults=["hang"])])
    with CoserveClient(server.base_url) as client:
        job = client.submit_jsonl(source, str(output))
        first = next(client.results(job))
        assert first.custom_id == "quick"
        assert job.status.state is JobState.RUNNING
        job.cancel()
        assert job.wait().state is JobState.CANCELLED
        assert [result.custom_id for result in client.results(job)] == ["quick"]


async def test_a_job_is_cancelled_also_while_a_timeout_within_it_ends(
    server: FaultServer, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[AsyncJob] = []

    retrieve = LocalBatchApi.retrieve

    async def interrupted(api: BatchApi, batch_id: str) -> Batch:
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                asyncio.get_running_loop().call_soon(jobs[0].cancel)
                await asyncio.sleep(3600)
        return await retrieve(api, batch_id)

    monkeypatch.setattr(LocalBatchApi, "retrieve", interrupted)
    write_lines(source, [line("endless", faults=["hang"])])
    async with asyncio.timeout(GIVE_UP_S), AsyncCoserveClient(server.base_url) as client:
        jobs.append(await client.submit_jsonl(source, output))
        assert (await jobs[0].wait()).state is JobState.CANCELLED


def test_a_torn_record_is_not_a_result(server: FaultServer, source: Path, output: Path) -> None:
    with CoserveClient(server.base_url) as client:
        client.submit_jsonl(source, output).wait()
    whole = output.read_bytes()
    output.write_bytes(whole[:-5])
    assert len(list(read_results(output))) == 52
    output.write_bytes(whole + b"not a record\n")
    with pytest.raises(InputFileError, match="not a record of a batch run"):
        list(read_results(output))


def test_a_failed_job_does_not_look_like_a_finished_one(
    server: FaultServer, source: Path, output: Path
) -> None:
    server.on_request = lambda _count: server.die_here()
    with CoserveClient(server.base_url, options=IMPATIENT) as client:
        job = client.submit_jsonl(source, output)
        with pytest.raises(ServerGoneError):
            job.wait()
        assert job.status.state is JobState.FAILED
        seen = []
        with pytest.raises(ServerGoneError):
            seen.extend(client.results(job))


def test_a_file_that_cannot_be_used_is_refused_at_once(tmp_path: Path, output: Path) -> None:
    with CoserveClient() as client, pytest.raises(InputFileError):
        client.submit_jsonl(tmp_path / "missing.jsonl", output)
    with pytest.raises(InputFileError, match="submit a batch"):
        next(read_results(output))


def test_a_closed_client_may_be_closed_again_and_its_jobs_still_be_asked(
    server: FaultServer, source: Path, output: Path
) -> None:
    with CoserveClient(server.base_url) as client:
        job = client.submit_jsonl(source, output)
        results = client.results(job)
        next(results)
        job.wait()
        client.close()
    job.cancel()
    assert job.wait() == job.status
    assert len(list(results)) == 52
    assert len(list(client.results(job))) == 53


def test_a_client_forgets_jobs_that_have_ended(
    server: FaultServer, source: Path, tmp_path: Path
) -> None:
    with CoserveClient(server.base_url) as client:
        job = client.submit_jsonl(source, tmp_path / "first.jsonl")
        job.wait()
        first = weakref.ref(job._job)
        del job
        client.submit_jsonl(source, tmp_path / "second.jsonl").wait()
        gc.collect()
        assert first() is None


@pytest.mark.parametrize("name", ["request_timeout_s", "concurrency"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_options_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be greater than 0, not {value}"):
        ClientOptions(**{name: value})  # type: ignore[arg-type]


def test_a_server_with_a_certificate_of_ones_own_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, output: Path
) -> None:
    """The authority is in ``SSL_CERT_FILE``, as for other programs."""
    context = own_authority(tmp_path, monkeypatch)

    async def has_batches(url: str) -> bool:
        async with AsyncCoserveClient(url, options=IMPATIENT) as client:
            return await client.batches.is_on()

    with web_server(lambda call: call.answer(404), context) as server:
        assert not asyncio.run(has_batches(server.url))
        with pytest.raises(ServerError, match="did not empty its cache"):
            make_ready(server.url, 30.0)
        monkeypatch.delenv("SSL_CERT_FILE")
        with CoserveClient(server.url, options=IMPATIENT) as client:
            job = client.submit_jsonl(source, output, use_batch=False)
            with pytest.raises(ServerGoneError, match="certificate verify failed"):
                job.wait()


@pytest.mark.parametrize("base_url", ["", "localhost:30000", "ftp://x", "http://", "http://a:b"])
def test_addresses_that_are_none(base_url: str) -> None:
    with pytest.raises(ConfigError, match=r"server .*: (use http|Invalid)"):
        AsyncCoserveClient(base_url)


def test_a_name_and_a_password_are_sent_and_not_shown(source: Path, output: Path) -> None:
    write_lines(source, [line("a")])
    with web_server(lambda call: call.answer(307)) as server:
        url = server.url.replace("//", "//me:p%40ss@")
        with CoserveClient(url, options=IMPATIENT) as client:
            with pytest.raises(RequestError) as caught:
                client.submit_jsonl(source, output)
            client.submit_jsonl(source, output, use_batch=False).wait()
    assert server.url in str(caught.value) and "p%40ss" not in str(caught.value)
    sent = {call.headers["authorization"] for call in server.calls}
    assert sent == {"Basic " + b64encode(b"me:p@ss").decode()}


def test_an_empty_key_is_none(server: FaultServer, source: Path, output: Path) -> None:
    with CoserveClient(server.base_url, api_key="", options=IMPATIENT) as client:
        client.submit_jsonl(source, output).wait()
    assert set(server.authorization) == {None}


@pytest.mark.parametrize("api_key", ["two\nlines", "schlüssel"])
def test_keys_that_no_header_can_carry(api_key: str) -> None:
    with pytest.raises(ConfigError, match="API key") as caught:
        AsyncCoserveClient(api_key=api_key)
    assert api_key not in str(caught.value)


def test_a_script_that_forgets_to_close_still_ends(server: FaultServer, source: Path) -> None:
    script = (
        "from sglang_coserve.client import CoserveClient\n"
        f"CoserveClient({server.base_url!r}).submit_jsonl({str(source)!r},"
        f" {str(source.with_name('o.jsonl'))!r}).wait(progress=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
