"""Text of others, made fit for a terminal."""

from __future__ import annotations

import unicodedata
from typing import Final

__all__ = ["printable"]

_KEPT: Final = "\n\t"
_ESCAPED: Final = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Categories of Unicode: controls, what is invisible or reorders the text, private use, halves of
pairs, and separators that some terminals break a line at."""


def printable(text: str) -> str:
    r"""Return ``text`` with an escape, as in ``\x1b``, for every character that is no text.

    What a server, a file or a user wrote could otherwise move the cursor, set the title
    or the clipboard, hide itself, or change what was printed before. Newlines and tabs
    stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(char) if unicodedata.category(char) in _ESCAPED and char not in _KEPT else char
        for char in text
    )


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
