"""Reads results back, from files that may still be growing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sglang_coserve.client.batch_result import BatchResult, decode_record
from sglang_coserve.client.result_files import errors_path
from sglang_coserve.errors import InputFileError

__all__ = ["ResultStream", "read_results"]

_BATCH_RECORDS = 256


class ResultStream:
    """The records of an output and its error file, each of them once, as they appear."""

    def __init__(self, output: Path) -> None:
        self._offsets = {output: 0, errors_path(output): 0}

    def read_new(self) -> list[BatchResult]:
        """Return some of the whole records not returned before, or [] when there are none.

        Raises:
            InputFileError: a line is no record.
        """
        results: list[BatchResult] = []
        for path, offset in self._offsets.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(offset)
                for record in file:
                    if len(results) >= _BATCH_RECORDS or not record.endswith(b"\n"):
                        break
                    results.append(_decode(path, record))
                    self._offsets[path] += len(record)
        return results


def read_results(output: str | Path) -> Iterator[BatchResult]:
    """Yield every result in ``output`` and its error file, in no particular order.

    An unfinished record at the end of a file is left out.

    Raises:
        InputFileError: there is no such file, or a line of it is no record.
    """
    path = Path(output)
    if not path.is_file():
        raise InputFileError(f"{path} is not there: submit a batch with this output first")
    stream = ResultStream(path)
    while results := stream.read_new():
        yield from results


def _decode(path: Path, record: bytes) -> BatchResult:
    try:
        return decode_record(record)
    except ValueError as error:
        raise InputFileError(f"{path}: {error}: {record[:60]!r}") from error
