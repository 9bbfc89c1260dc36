"""A file cut into lines, without ever holding more than one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

__all__ = ["UTF16_BOMS", "Line", "is_blank", "read_lines"]

UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
"""How a file begins that is not UTF-8."""

_UTF8_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20


class Line(NamedTuple):
    """One line as it stands in the file."""

    number: int
    """1-based; blank lines count."""

    size_bytes: int
    """Length in the file, line ending included."""

    content: bytes | None
    """The line without its line ending; None when it is longer than allowed."""


def read_lines(
    file: BinaryIO,
    max_line_bytes: int,
    *,
    after_line: int = 0,
    on_excess: Callable[[bytes], None] | None = None,
) -> Iterator[Line]:
    """Yield the lines of ``file`` from where it stands, which is after line ``after_line``.

    A UTF-8 byte order mark, CRLF endings and a last line without an ending are
    accepted. Memory is bounded by ``max_line_bytes``: a longer line is given to
    ``on_excess`` piece by piece, without its ending, and dropped.
    """
    drop = on_excess or _ignore
    number = after_line
    while piece := file.readline(max_line_bytes + 1):
        number += 1
        size_bytes = len(piece)
        if number == 1:
            piece = piece.removeprefix(_UTF8_BOM)
        if size_bytes > max_line_bytes and not piece.endswith(b"\n"):
            drop(piece)
            while not piece.endswith(b"\n") and (piece := file.readline(_SKIP_BYTES)):
                size_bytes += len(piece)
                drop(_without_ending(piece))
            yield Line(number, size_bytes, None)
        else:
            yield Line(number, size_bytes, _without_ending(piece))


def _ignore(_: bytes) -> None:
    pass


def is_blank(content: bytes | None) -> bool:
    """Return True for a line of nothing but white space, which asks for nothing."""
    return content is not None and not content.strip()


def _without_ending(piece: bytes) -> bytes:
    if not piece.endswith(b"\n"):
        return piece
    return piece[:-2] if piece.endswith(b"\r\n") else piece[:-1]
