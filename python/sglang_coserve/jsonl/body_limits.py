"""Limits of the JSON of a request, checked on its bytes before anything parses it.

A parser holds the interpreter lock until it is done, in whatever thread it runs, and no client
gets a token meanwhile. So bodies are bounded, and counted piece by piece.

``mended_json`` mends text that was cut in UTF-16, before anything tokenizes it.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from sglang_coserve.errors import RequestError

_PIECE_BYTES: Final = 1 << 16
"""Takes 0.6 ms at the worst (nothing but quotation marks)."""


MAX_DEPTH: Final = 512
"""Levels of lists and objects within each other. Parsers count levels with the frames of Python
that they are called in (Python 3.11), so without a bound of ours a line that one place parses could
be too deep for another."""

COMMON_CONTEXT_TOKENS: Final = 131_072
"""The context of common models, where the model's is not known."""


class BodyTooLargeError(RequestError):
    """A body is beyond a limit."""


class BodyNotTextError(RequestError):
    """A body is not text in UTF-8."""


class BodyTooDeepError(BodyTooLargeError):
    """A body has too many levels."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What one request may be.

    The defaults let parsing and validating take 20 to 40 ms each at the worst. Measured on
    one core of an AMD EPYC, with ``json`` or ``orjson`` and then SGLang's models: 4 to 6 ms
    per MiB of text; 19 ms for 250,000 token ids; 26 to 40 ms for 5,000 messages of a chat.
    """

    max_bytes: int = 4 << 20
    max_values: int = 250_000
    """Commas and opening brackets outside of strings: each value has one before it."""

    max_objects: int = 5_000
    """Opening braces outside of strings."""

    max_keys: int = 25_000
    """Colons outside of strings. Each of them may be a fault of its own to Pydantic, which
    takes 10 ms to find so many."""

    context_tokens: int = COMMON_CONTEXT_TOKENS
    """Longest prompt and answer together, of the model. Bodies are not measured by it; the engine
    refuses longer requests."""


_FLAT_LEVELS: Final = 4
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEP: Final = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


class BodyMeter:
    """Measures a body that comes in pieces. Pieces of valid JSON; of anything else it counts
    something, and a parser says what is wrong."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._size_bytes = 0
        self._values = 0
        self._objects = 0
        self._keys = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def take(self, content: bytes) -> None:
        """Count ``content`` in; O(its length).

        Raises:
            BodyTooLargeError: the body is beyond a limit. Measure it no further.
        """
        limits = self._limits
        self._size_bytes += len(content)
        if self._size_bytes > limits.max_bytes:
            raise BodyTooLargeError(f"the request is larger than {limits.max_bytes:,} bytes")
        for start in range(0, len(content), _PIECE_BYTES):
            self._count(content[start : start + _PIECE_BYTES])
            for count, most, what in (
                (self._values, limits.max_values, "values"),
                (self._objects, limits.max_objects, "objects"),
                (self._keys, limits.max_keys, "keys"),
            ):
                if count > most:
                    message = f"the request has more than {most:,} {what}: split it"
                    raise BodyTooLargeError(message)

    def _count(self, piece: bytes) -> None:
        if self._is_escaped:
            piece = piece[1:]
        piece = piece.replace(b"\\\\", b"")
        self._is_escaped = piece.endswith(b"\\")
        # Every quotation mark that is left opens or closes a string.
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        objects = outside.count(b"{")
        openings = outside.count(b"[") + objects
        self._objects += objects
        self._keys += outside.count(b":")
        self._values += outside.count(b",") + openings
        if self._depth + openings > MAX_DEPTH:
            self._raise_if_deep(outside)
        self._depth += openings - outside.count(b"]") - outside.count(b"}")

    def _raise_if_deep(self, outside: bytes) -> None:
        brackets = outside.translate(None, _NO_BRACKETS)
        for _ in range(_FLAT_LEVELS):  # Most of them go at once, by the innermost.
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        depths = accumulate(map(_STEP.__getitem__, brackets), initial=self._depth)
        if any(depth > MAX_DEPTH - _FLAT_LEVELS for depth in depths):
            raise BodyTooDeepError(
                f"the request has lists or objects in each other, more than {MAX_DEPTH} levels:"
                " nest them less"
            )


class BodyCheck:
    """Measures a body that comes in pieces, and checks that it is text in UTF-8.

    JSON between programs must be UTF-8. ``json.loads`` also reads UTF-16 and UTF-32, which
    ``BodyMeter`` cannot count, and encoded halves of surrogate pairs, which no message can hold.
    """

    def __init__(self, limits: BodyLimits) -> None:
        self._meter = BodyMeter(limits)
        self._decoder = getincrementaldecoder("utf-8")()

    def take(self, content: bytes, *, is_last: bool) -> None:
        """Check the next piece; O(its length). Check nothing further once an error is raised.

        Raises:
            BodyTooLargeError: the body is beyond a limit.
            BodyNotTextError: the body is not UTF-8, or its last piece ends within a character.
        """
        self._meter.take(content)
        try:
            for start in range(0, len(content), _PIECE_BYTES):
                self._decoder.decode(content[start : start + _PIECE_BYTES])
            if is_last:
                self._decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise BodyNotTextError(f"the body is not UTF-8: {error.reason}") from None
        # JSON escapes this character. In UTF-16 and UTF-32 every brace has one.
        if b"\0" in content:
            raise BodyNotTextError("the body is not JSON in UTF-8: it has a NUL byte")


def check_body(content: bytes, limits: BodyLimits) -> None:
    """Measure a whole body.

    Raises:
        BodyTooLargeError: it is beyond a limit.
    """
    BodyMeter(limits).take(content)


_HEX: Final = "[0-9a-fA-F]{2}"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}", rf"\\u[dD][c-fC-F]{_HEX}"
_HALF: Final = re.compile(
    rf"\\u[dD](?:[89abAB]{_HEX}(?!{_LOW})|[c-fC-F]{_HEX}(?<!{_HIGH}{_LOW}))".encode()
)
_NO_UTF8: Final = b"\xff\xff"


def mended_json(content: bytes) -> bytes:
    """Return JSON with U+FFFD in place of every half of a surrogate pair, else as it is.

    JSON has them as escapes (``"\\ud83d"``), and no tokenizer takes them. O(n), and nothing for
    JSON without such escapes. Malformed JSON stays malformed.
    """
    if not (b"\\ud" in content or b"\\uD" in content) or _NO_UTF8[:1] in content:
        return content
    # What is left of backslashes begins an escape.
    mended, halves = _HALF.subn(rb"\\ufffd", content.replace(b"\\\\", _NO_UTF8))
    return mended.replace(_NO_UTF8, b"\\\\") if halves else content
