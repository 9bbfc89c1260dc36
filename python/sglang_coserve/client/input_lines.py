"""Stream the lines of a batch file without ever holding more than one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from sglang_coserve.errors import InputFileError

__all__ = ["InputLine", "LineRef", "open_input", "read_lines"]

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_SKIP_BYTES = 1 << 20


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
        return self.content is not None and not self.content.strip()


def open_input(path: Path) -> BinaryIO:
    """Open a batch file for reading.

    Raises:
        InputFileError: it cannot be read, is not a regular file (a resumed run
            reads it again, so a pipe will not do), or is UTF-16.
    """
    if path.exists() and not path.is_file():
        raise InputFileError(f"{path} is not a regular file: save the lines to a file first")
    try:
        file = path.open("rb", buffering=_SKIP_BYTES)
    except OSError as error:
        raise InputFileError(f"cannot read {path}: {error.strerror}") from error
    if file.read(2) in _UTF16_BOMS:
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
        number = 0
        while piece := file.readline(max_line_bytes + 1):
            number += 1
            size_bytes = len(piece)
            if number == 1:
                piece = piece.removeprefix(_UTF8_BOM)
            content: bytes | None = _without_ending(piece)
            fingerprint = blake2b(content or b"", digest_size=8)
            if size_bytes > max_line_bytes and not piece.endswith(b"\n"):
                content = None
                while not piece.endswith(b"\n") and (piece := file.readline(_SKIP_BYTES)):
                    size_bytes += len(piece)
                    fingerprint.update(_without_ending(piece))
            # 0 marks "no record" in FinishedLines.
            digest = int.from_bytes(fingerprint.digest()) or 1
            yield InputLine(LineRef(number, digest, size_bytes), content)


def _without_ending(piece: bytes) -> bytes:
    if not piece.endswith(b"\n"):
        return piece
    return piece[:-2] if piece.endswith(b"\r\n") else piece[:-1]
