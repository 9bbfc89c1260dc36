"""What a batch file will take, by its beginning: an answer at once, whatever its size."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sglang_coserve.jsonl.lines import is_blank, read_lines
from sglang_coserve.jsonl.request_line import BadLineError, estimate_tokens, parse_request_line

__all__ = ["estimate_file"]

_SAMPLE_BYTES: Final = 1 << 16
"""Read in a few milliseconds; a hundred lines or more of most files."""


def estimate_file(path: Path, endpoint: str, max_line_bytes: int) -> int:
    """Return the tokens that the requests in a file may take, prompts and answers. Blocks.

    Those of its first 64 KiB, in proportion to its size: exact for a small file, as exact as
    ``estimate_tokens`` is. Lines that are no requests count as nothing. 0 if it cannot be read.
    """
    tokens = size_bytes = 0
    try:
        with path.open("rb") as file:
            for line in read_lines(file, max_line_bytes):
                size_bytes += line.size_bytes
                if line.content is not None and not is_blank(line.content):
                    tokens += _tokens(line.content, line.size_bytes, endpoint)
                if size_bytes >= _SAMPLE_BYTES:
                    break
            total_bytes = path.stat().st_size
    except OSError:
        return 0
    return round(tokens * total_bytes / size_bytes) if size_bytes else 0


def _tokens(content: bytes, size_bytes: int, endpoint: str) -> int:
    try:
        return estimate_tokens(size_bytes, parse_request_line(content, endpoint).body)
    except BadLineError:
        return 0
