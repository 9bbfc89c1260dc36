"""``kill -9`` of the server, again and again: one record per line in the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from batch.crash_child import NUM_BATCHES, NUM_TOKENS
from batch.scenarios import OWNER, opened
from batch.scripted_backend import tokens_of
from sglang_coserve.lines.result_record import RECORD_START, batch_tag, record_identity
from waiting import eventually

TEST_DIRECTORY = Path(__file__).parent.parent
LINES_PER_KILL = 40
MAX_UP_S = 0.4


class Server:
    """The child process, in one directory, as often as it takes."""

    def __init__(self, directory: Path, num_lines: int) -> None:
        self.data = directory / "data"
        self.num_lines = num_lines
        self.engine_log = directory / "engine"
        self.engine_log.touch()

    def start(self) -> subprocess.Popen[str]:
        child = Path(__file__).with_name("crash_child.py")
        arguments = [str(self.data), str(self.num_lines), str(self.engine_log)]
        return subprocess.Popen(
            [sys.executable, str(child), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TEST_DIRECTORY), *sys.path])},
        )

    def engine_starts(self) -> list[tuple[str, str, int]]:
        """(batch, custom id, tokens continued from) of every line the engine took."""
        entries = (entry.split() for entry in self.engine_log.read_text().splitlines())
        return [(batch_id, custom_id, int(count)) for batch_id, custom_id, count in entries]

    def journal_time_ns(self) -> int:
        """When tokens were last written; 0: not yet."""
        times = [path.stat().st_mtime_ns for path in (self.data / "journal").glob("*")]
        return max(times, default=0)

    def wait_for_tokens(self, starts_before: int) -> None:
        """Wait until lines have started and tokens are written, however slow the machine is."""
        eventually(lambda: len(self.engine_starts()) > starts_before)
        written_ns = self.journal_time_ns()
        eventually(lambda: self.journal_time_ns() > written_ns)

    def finished(self) -> set[tuple[str, int]]:
        """(batch, line) of every whole record on the disk."""
        found: Counter[tuple[str, int]] = Counter()
        for path in (self.data / "files").glob("*"):
            for record in path.read_bytes().splitlines(keepends=True):
                if not record.startswith(RECORD_START):
                    break
                batch_id = "batch_" + record[len(RECORD_START) :][:24].decode()
                if (identity := record_identity(record)) is not None:
                    assert identity[0] == batch_tag(batch_id)
                    found[batch_id, identity[1]] += 1
        assert not [line for line, count in found.items() if count > 1], "a line has two records"
        return set(found)

    def tear(self, rng: random.Random) -> None:
        """Leave half a write at the end of some files, as if the machine had died."""
        results = [
            path
            for path in (self.data / "files").glob("*")
            if path.read_bytes().startswith(RECORD_START)
        ]
        journals = list((self.data / "journal").glob("*"))
        for paths, torn in ((results, RECORD_START), (journals, b"\x01\0\0\0\x05\0")):
            for path in paths:
                with path.open("ab") as file:
                    file.write(torn[: rng.randint(0, len(torn))])


@pytest.mark.parametrize(
    "num_kills", [10, pytest.param(100, marks=pytest.mark.heavy)], ids=["10 kills", "100 kills"]
)
def test_killed_servers_add_up_to_one_record_per_line(tmp_path: Path, num_kills: int) -> None:
    rng = random.Random(num_kills)
    server = Server(tmp_path, num_lines=LINES_PER_KILL * num_kills // NUM_BATCHES)
    continued = 0
    for number in range(num_kills):
        finished = server.finished() if server.data.exists() else set()
        starts_before = len(server.engine_starts())
        process = server.start()
        assert process.stdout is not None
        # Every fifth one dies while it starts.
        if number % 5 == 4:
            time.sleep(rng.uniform(0.0, 1.0))
        elif process.stdout.readline() == "ready\n":
            if not continued:
                server.wait_for_tokens(starts_before)
            time.sleep(rng.uniform(0.0, MAX_UP_S))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        for batch_id, custom_id, tokens in server.engine_starts()[starts_before:]:
            line = int(custom_id.rpartition("-")[2])
            assert (batch_id, line) not in finished, "a finished line was served again"
            continued += tokens > 0
        if rng.random() < 0.5:
            server.tear(rng)
    assert continued > 0, "no line was continued from its journaled tokens"

    with server.start() as process:
        assert process.communicate(timeout=120)[0] == "ready\ndone\n"
    asyncio.run(check_results(server))


async def check_results(server: Server) -> None:
    """Every batch is complete, and every line has the answer that an undisturbed run gives."""
    async with (scene := await opened(server.data)).service as service:
        batches = (await service.list_batches(OWNER)).data
        assert len(batches) == NUM_BATCHES
        for batch in batches:
            assert batch.status == "completed"
            num_bad = server.num_lines // 10
            counts = (batch.request_counts.completed, batch.request_counts.failed)
            assert counts == (server.num_lines - num_bad, num_bad)
            assert batch.usage.output_tokens == NUM_TOKENS * counts[0]
            records = await scene.records(batch)
            assert len(records) == server.num_lines
            for custom_id, record in records.items():
                if record["response"]["status_code"] == 200:
                    text = record["response"]["body"]["choices"][0]["text"]
                    assert text == " ".join(map(str, tokens_of(custom_id, NUM_TOKENS)))
        files = {file.id for file in (await service.list_files(OWNER)).data}
        assert files == {path.name for path in (server.data / "files").iterdir()}
        assert list((server.data / "journal").iterdir()) == []
        assert list((server.data / "in_doubt").iterdir()) == []
