"""A short key of a prompt's beginning: prompts that begin alike have keys that begin alike."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeGuard

import orjson

__all__ = ["KEY_BLOCK_BYTES", "MOST_KEY_BYTES", "prefix_key"]

_BLOCK_BYTES: Final = 128
"""About 32 tokens: what two prompts have in common is seen to within so much."""

_MOST_BLOCKS: Final = 64
KEY_BLOCK_BYTES: Final = 4
MOST_KEY_BYTES: Final = KEY_BLOCK_BYTES * _MOST_BLOCKS


def prefix_key(body: Mapping[str, Any]) -> bytes:
    """Return the key of a request's prompt. O(its first 8 KiB).

    For each block of 128 bytes of its text, 4 bytes that depend on all text up to the
    block's end. So sorted by keys, prompts stand next to those with which they share most,
    whatever chat template is put around them; where two differ by chance only in
    the 4 bytes, they stand apart, and nothing else comes of it. What the prompt is made of
    is not checked.
    """
    key: list[int] = []
    checksum, pending = 0, b""
    for piece in _pieces(body):
        pending += piece
        num_blocks = min(len(pending) // _BLOCK_BYTES, _MOST_BLOCKS - len(key))
        for start in range(0, num_blocks * _BLOCK_BYTES, _BLOCK_BYTES):
            checksum = zlib.crc32(pending[start : start + _BLOCK_BYTES], checksum)
            key.append(checksum)
        if len(key) == _MOST_BLOCKS:
            return struct.pack(f">{len(key)}I", *key)
        pending = pending[num_blocks * _BLOCK_BYTES :]
    if pending:
        key.append(zlib.crc32(pending, checksum))
    return struct.pack(f">{len(key)}I", *key)


def _pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the beginning of a prompt, in the order in which templates put it together."""
    if tools := body.get("tools"):
        yield _plain(tools)
    yield from _texts(body.get("instructions"))
    for name in ("messages", "prompt", "input"):
        value = body.get(name)
        if _is_tokens(value):
            yield array("Q", value[: _MOST_BLOCKS * _BLOCK_BYTES // 8]).tobytes()
        else:
            yield from _texts(value)


def _texts(value: object) -> Iterator[bytes]:
    if isinstance(value, str):
        # A cut before encoding: a prompt may have megabytes.
        yield value[: _MOST_BLOCKS * _BLOCK_BYTES].encode(errors="surrogatepass")
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name in ("role", "type"):
            yield from _texts(value.get(name))
        yield from _texts(value.get("content") or value.get("text"))
        # Images and the like: their address, or their beginning.
        yield from _others(value, ("role", "type", "content", "text"))


def _others(value: Mapping[str, Any], known: Iterable[str]) -> Iterator[bytes]:
    for name, other in value.items():
        if name not in known:
            yield _plain(other)[: _MOST_BLOCKS * _BLOCK_BYTES]


def _plain(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # Nested too deeply, or half a surrogate pair.
        return b"?"


def _is_tokens(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 1 << 64 for token in value[:1024])
    )
