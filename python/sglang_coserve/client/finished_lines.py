"""Which lines of the input have a record, and what those lines said."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from sglang_coserve.client.input_lines import InputLine
from sglang_coserve.errors import InputFileError

__all__ = ["FinishedLines"]


class FinishedLines:
    """Line number to digest, in 8 bytes per line up to the last finished one."""

    def __init__(self) -> None:
        # Indexed by line number; 0 is "no record", which no digest ever is.
        self._digests = array("Q")
        self._count = 0
        self.size_bytes = 0
        """Of the lines that ``check_unchanged`` found as they were."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        return line < len(self._digests) and self._digests[line] != 0

    def add(self, line: int, digest: int) -> bool:
        """Record that ``line`` is finished; return False when it already was. O(1) amortized."""
        if line in self:
            return False
        if line >= len(self._digests):
            self._digests.frombytes(bytes(8 * (line + 1 - len(self._digests))))
        self._digests[line] = digest
        self._count += 1
        return True

    def check_unchanged(self, lines: Iterable[InputLine]) -> None:
        """Compare the finished lines with the input they are said to come from.

        Lines that are not finished may change, and lines may be added at the
        end: neither makes a record wrong.

        Raises:
            InputFileError: a finished line is gone or says something else.
        """
        last = len(self._digests) - 1
        number = 0
        if last >= 1:
            for line in lines:
                number = line.ref.number
                if number in self:
                    if self._digests[number] != line.ref.digest:
                        raise InputFileError(
                            f"line {number} of the input has changed since its result was written"
                        )
                    self.size_bytes += line.ref.size_bytes
                if number == last:
                    return
            raise InputFileError(
                f"there is a result for line {last}, but the input ends at line {number}"
            )
