"""What a batch file will take, by its beginning: an answer at once, whatever its size."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Final

from sglang_coserve.jsonl.lines import read_lines
from sglang_coserve.jsonl.request_line import BadLineError, estimate_tokens, parse_request_line

__all__ = ["estimate_file"]

_SAMPLE_BYTES: Final = 1 << 16
"""A hundred lines or more of most files. A line of that size takes less than half a millisecond
to parse, which holds the interpreter lock: a longer one is judged by its size alone."""


def estimate_file(path: Path, endpoint: str, context_tokens: int) -> int:
    """Return the tokens that the requests in a file may take, prompts and answers. Blocks.

    Those of its first 64 KiB, in proportion to its size: exact for a small file, as exact as
    ``estimate_tokens`` is. Lines that are no requests count as nothing; a first line that is
    longer than that counts as a request. 0 if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            sample = file.read(_SAMPLE_BYTES)
            total_bytes = path.stat().st_size
    except OSError:
        return 0
    if len(sample) < total_bytes:
        # Its last line is cut off, and left out unless it is the only one.
        sample = sample[: sample.rfind(b"\n") + 1] or sample
        if not sample.endswith(b"\n"):
            return round(
                estimate_tokens(len(sample), {}, context_tokens) * total_bytes / len(sample)
            )
    lines = read_lines(BytesIO(sample), _SAMPLE_BYTES)
    tokens = sum(
        _tokens(line.content or b"", line.size_bytes, endpoint, context_tokens) for line in lines
    )
    return round(tokens * total_bytes / len(sample)) if sample else 0


def _tokens(content: bytes, size_bytes: int, endpoint: str, context_tokens: int) -> int:
    try:
        body = parse_request_line(content, endpoint).body
        return estimate_tokens(size_bytes, body, context_tokens)
    except BadLineError:
        return 0
