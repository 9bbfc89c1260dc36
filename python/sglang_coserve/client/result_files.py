"""The output of a batch and the error file beside it: together, one record per line."""

from __future__ import annotations

from pathlib import Path

from sglang_coserve.client.batch_result import BatchResult, encode_record
from sglang_coserve.client.finished_lines import FinishedLines
from sglang_coserve.client.input_lines import open_input, read_lines
from sglang_coserve.client.record_file import RecordFile
from sglang_coserve.errors import InputFileError

__all__ = ["ResultFiles", "errors_path"]


def errors_path(output: Path) -> Path:
    """Return where the failed lines of ``output`` go: ``a.jsonl`` → ``a.errors.jsonl``."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".errors.jsonl")


class ResultFiles:
    """What a run has written, and the only memory a later run needs.

    There is no journal: the records themselves say which lines are finished.
    A record is one ``write``, so a process killed at any point leaves at most
    one unfinished line at the end of a file, which the next ``open`` cuts off.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.errors = errors_path(output)
        self.finished = FinishedLines()
        self.earlier_ok = 0
        self.earlier_failed = 0
        self._ok_file = RecordFile(self.output)
        self._failed_file = RecordFile(self.errors)

    def open(self, source: Path, max_line_bytes: int, *, retry_failed: bool = False) -> None:
        """Lock the files and find out which lines of ``source`` are finished.

        Reads everything that was written and, when that is something, the
        input: call it in a thread. With ``retry_failed`` the error records are
        dropped, so their lines are unfinished again. Until every check has
        passed nothing is changed.

        Raises:
            InputFileError: the files are in use, are not ours, or were made
                from another input; see ``RecordFile`` and ``FinishedLines``.
        """
        open_input(source).close()
        for path in (self.output, self.errors):
            if path.exists() and path.samefile(source):
                raise InputFileError(f"{path} would overwrite the input: choose another output")
        try:
            self._ok_file.open()
            self._ok_file.lock()
            self.earlier_ok = self._load(self._ok_file, self.finished, source)
            failed = FinishedLines() if retry_failed else self.finished
            self.earlier_failed = self._load(self._failed_file, failed, source)
            try:
                self.finished.check_unchanged(read_lines(source, max_line_bytes))
            except InputFileError as error:
                raise InputFileError(
                    f"{self.output} cannot be continued from {source}: {error};"
                    " choose another output, or move this one away"
                ) from error
            self._ok_file.drop_torn_tail()
            if retry_failed:
                self._failed_file.clear()
                self.earlier_failed = 0
            else:
                self._failed_file.drop_torn_tail()
        except BaseException:
            self.close()
            raise

    def _load(self, file: RecordFile, finished: FinishedLines, source: Path) -> int:
        """Add the records of ``file`` to ``finished`` and return how many there are."""
        # A line has at least one byte: a number beyond that is from another file,
        # and must not size an array.
        last_possible = source.stat().st_size
        count = 0
        for line, digest in file.scan():
            if line > last_possible:
                raise InputFileError(
                    f"{file.path} has a result for line {line}, which {source} does not have:"
                    " choose another output, or move this one away"
                )
            if not finished.add(line, digest):
                raise InputFileError(f"{file.path} has a second result for line {line}: remove it")
            count += 1
        return count

    def append(self, result: BatchResult, digest: int) -> None:
        """Write the record of one line, to the output or to the error file.

        Raises:
            InputFileError: it could not be written.
        """
        is_new = self.finished.add(result.line, digest)
        assert is_new, f"line {result.line} has a record already"
        (self._ok_file if result.ok else self._failed_file).append(encode_record(result, digest))

    def sync(self) -> None:
        """Force what was written to the disk."""
        self._ok_file.sync()
        self._failed_file.sync()

    def close(self) -> None:
        """Force everything to the disk and let other clients write."""
        try:
            self._failed_file.close()
        finally:
            self._ok_file.close()
