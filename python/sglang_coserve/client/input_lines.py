"""Stream the lines of a batch file without ever holding more than one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from sglang_coserve.errors import InputFileError
from sglang_coserve.jsonl import lines
from sglang_coserve.jsonl.prefix_order import OrderedLine

__all__ = ["InputLine", "LineRef", "open_input", "read_line", "read_lines"]

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LineRef:
    """Which line of the input, and a fingerprint of what it said."""

    number: int
    """1-based; blank lines count."""

    digest: int
    """64-bit BLAKE2b of the line without its line ending; never 0."""

    size_bytes: int
    """Length in the file, line ending included."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line as it stands in the file."""

    ref: LineRef

    content: bytes | None
    """The line without its line ending; None when it is longer than allowed."""

    @property
    def is_blank(self) -> bool:
        """True for a line of nothing but white space, which asks for nothing."""
        return lines.is_blank(self.content)


def open_input(path: Path) -> BinaryIO:
    """Open a batch file for reading.

    Raises:
        InputFileError: it cannot be read, is not a regular file (a resumed run
            reads it again, so a pipe will not do), or is UTF-16.
    """
    if path.exists() and not path.is_file():
        raise InputFileError(f"{path} is not a regular file: save the lines to a file first")
    try:
        file = path.open("rb", buffering=_READ_BYTES)
    except OSError as error:
        raise InputFileError(f"cannot read {path}: {error.strerror}") from error
    if file.read(2) in lines.UTF16_BOMS:
        file.close()
        raise InputFileError(f"{path} is UTF-16: save it as UTF-8")
    file.seek(0)
    return file


def read_lines(path: Path, max_line_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of ``path`` in order, blank ones included.

    A UTF-8 byte order mark, CRLF endings and a last line without an ending are
    accepted. Memory is bounded by ``max_line_bytes``: what is beyond it is
    hashed and dropped.

    Raises:
        InputFileError: see ``open_input``.
    """
    with open_input(path) as file:
        yield from _lines(file, max_line_bytes, after_line=0)


def read_line(file: BinaryIO, at: OrderedLine, max_line_bytes: int) -> InputLine | None:
    """Return one line of a batch file, None where the file has become shorter."""
    file.seek(at.offset)
    return next(_lines(file, max_line_bytes, after_line=at.number - 1), None)


def _lines(file: BinaryIO, max_line_bytes: int, after_line: int) -> Iterator[InputLine]:
    excess = blake2b(digest_size=8)

    def hash_excess(piece: bytes) -> None:
        excess.update(piece)

    for line in lines.read_lines(
        file, max_line_bytes, after_line=after_line, on_excess=hash_excess
    ):
        fingerprint = excess
        if line.content is None:
            excess = blake2b(digest_size=8)
        else:
            fingerprint = blake2b(line.content, digest_size=8)
        # 0 marks "no record" in FinishedLines.
        digest = int.from_bytes(fingerprint.digest()) or 1
        yield InputLine(LineRef(line.number, digest, line.size_bytes), line.content)
