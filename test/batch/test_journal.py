"""Generated tokens come back after a crash, or are forgotten, but are never wrong."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_coserve.errors import StorageError
from sglang_coserve.lines.background import WorkerThreads
from sglang_coserve.lines.journal import TokenJournal
from sglang_coserve.lines.line_source import LineBitmap

COMPACT_BYTES = 300
LINES = st.integers(1, 5)
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)


def bitmap(*lines: int) -> LineBitmap:
    finished = LineBitmap()
    for line in lines:
        finished.add(line)
    return finished


def a_journal(path: Path, model: str = "m") -> TokenJournal:
    return TokenJournal(path, model, COMPACT_BYTES)


def write(journal: TokenJournal) -> None:
    journal.write(*journal.take_unwritten())


class JournalWithCrashes(RuleBasedStateMachine):
    """Crashes lose what was not written, and a cut file loses its last entries."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.path = Path(self.directory.name) / "journal"
        self.journal = a_journal(self.path)
        self.expected: dict[int, list[int]] = {}
        self.written: dict[int, list[int]] = {}
        self.finished = LineBitmap()

    def teardown(self) -> None:
        self.directory.cleanup()

    @rule(line=LINES, tokens=TOKENS)
    def tokens_are_generated(self, line: int, tokens: list[int]) -> None:
        if line not in self.finished:
            self.journal.add(line, tokens)
            self.expected.setdefault(line, []).extend(tokens)

    @rule()
    def tokens_are_written(self) -> None:
        if self.journal._unwritten:
            write(self.journal)
            self.written = {line: [*tokens] for line, tokens in self.expected.items()}

    @rule(line=LINES)
    def a_line_finishes(self, line: int) -> None:
        if sum(each in self.finished for each in range(1, 6)) < 3:
            self.finished.add(line)
            self.journal.drop(line)
            self.expected.pop(line, None)

    @rule()
    def a_crash(self) -> None:
        self.journal = a_journal(self.path)
        self.journal.load(self.finished)
        self.expected = {
            line: tokens for line, tokens in self.written.items() if line not in self.finished
        }
        self.written = {line: [*tokens] for line, tokens in self.expected.items()}

    @rule(cut_bytes=st.integers(1, 200))
    def a_crash_that_cuts_the_file(self, cut_bytes: int) -> None:
        if self.path.exists():
            content = self.path.read_bytes()
            self.path.write_bytes(content[: max(0, len(content) - cut_bytes)])
        journal = a_journal(self.path)
        journal.load(self.finished)
        for line in range(1, 6):
            kept = list(journal.tokens(line))
            assert kept == self.written.get(line, [])[: len(kept)]
            self.expected[line] = kept
        self.written = {line: [*tokens] for line, tokens in self.expected.items()}
        self.journal = journal

    @invariant()
    def every_token_is_known(self) -> None:
        for line in range(1, 6):
            assert list(self.journal.tokens(line)) == self.expected.get(line, [])

    @invariant()
    def finished_lines_do_not_pile_up(self) -> None:
        if self.path.exists():
            live_bytes = sum(12 + 4 * len(tokens) for tokens in self.expected.values())
            one_write_bytes = 5 * (12 + 4 * 8 * 50)
            assert self.path.stat().st_size <= max(COMPACT_BYTES, 2 * live_bytes) + one_write_bytes


TestJournalWithCrashes = JournalWithCrashes.TestCase


@given(position=st.integers(0, 200), flip=st.integers(1, 255))
def test_a_damaged_byte_costs_tokens_but_makes_none(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    journal = a_journal(path)
    for start in (0, 10, 20):
        journal.add(1, list(range(start, start + 10)))
        write(journal)
    content = bytearray(path.read_bytes())
    position %= len(content)
    content[position] ^= flip
    path.write_bytes(content)
    journal = a_journal(path)
    journal.load(bitmap())
    tokens = list(journal.tokens(1))
    assert tokens == list(range(len(tokens)))
    assert len(tokens) in (0, 10, 20)
    journal.add(1, [7])
    write(journal)
    again = a_journal(path)
    again.load(bitmap())
    assert list(again.tokens(1)) == [*tokens, 7]


def test_a_file_that_was_deleted_or_cut_is_written_whole_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = a_journal(path)
    for number, lose in enumerate((path.unlink, lambda: os.truncate(path, 40))):
        journal.add(1, [number])
        write(journal)
        lose()
        journal.add(2, [number])
        write(journal)
        write(journal)
        again = a_journal(path)
        again.load(bitmap())
        assert [again.tokens(line) for line in (1, 2)] == [(*range(number + 1),)] * 2


async def test_a_full_disk_costs_no_tokens_and_stops_no_batch(tmp_path: Path) -> None:
    path, free_bytes = tmp_path / "journal", 100

    @contextmanager
    def room(size_bytes: int) -> Iterator[None]:
        if size_bytes > free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield

    journal = TokenJournal(path, "m", COMPACT_BYTES, room)
    threads = WorkerThreads("test", 1)
    journal.add(1, range(10))
    await journal.save(threads)
    before = path.read_bytes()
    journal.add(1, range(100))
    await journal.save(threads)
    assert path.read_bytes() == before
    write(journal)  # There was room when it was asked for, and none when it was written.
    assert path.read_bytes() == before
    free_bytes = 1000
    journal.add(1, [7])
    await journal.save(threads)
    await threads.close()
    again = a_journal(path)
    again.load(bitmap())
    assert again.tokens(1) == (*range(10), *range(100), 7)


def test_a_failing_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "no directory").touch()
    journal = a_journal(tmp_path / "no directory" / "journal")
    journal.add(1, [1])
    with pytest.raises(StorageError, match="Not a directory"):
        write(journal)
    with pytest.raises(StorageError, match=str(tmp_path)):
        a_journal(tmp_path).delete()


@given(lines=st.sets(st.integers(0, 5000)))
def test_a_bitmap_is_a_set(lines: set[int]) -> None:
    finished = LineBitmap()
    for line in lines:
        assert finished.add(line)
        assert not finished.add(line)
    assert {line for line in range(5100) if line in finished} == lines
