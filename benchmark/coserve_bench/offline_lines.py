"""The offline file: JSONL in OpenAI's batch format, read, or made when none is given."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_coserve.client.input_lines import read_lines
from sglang_coserve.client.line_checker import BatchRequest, LineChecker
from sglang_coserve.errors import InputFileError

__all__ = ["OfflineRequest", "OfflineSpec", "read_requests", "write_sample"]

_MAX_LINE_BYTES = 64 << 20
_FIRST_TOKEN_ID = 16


@dataclass(frozen=True, slots=True)
class OfflineSpec:
    """The offline load."""

    file: Path | None = None
    """A file of the user's; None makes one of the lengths below."""

    prompt_tokens: int = 512
    output_tokens: int = 32
    lines: int = 2000
    concurrency: int = 32
    """Requests that the server has at any time."""


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """One line as it is sent."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def write_sample(path: Path, spec: OfflineSpec, vocab_size: int, seed: int) -> None:
    """Write lines of exactly the lengths in ``spec``, random and without common prefixes."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(spec.lines):
            body = {
                "model": "default",
                "prompt": rng.choices(range(_FIRST_TOKEN_ID, vocab_size), k=spec.prompt_tokens),
                "max_tokens": spec.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            line = {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": body,
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_requests(path: Path, extra: Mapping[str, Any]) -> Iterator[OfflineRequest]:
    """Yield the requests of a file, checked and marked offline as the client does.

    They are streamed, unlike the client's, so that each token can be counted
    when it comes; ``extra`` is added to each body.

    Raises:
        InputFileError: a line cannot be used.
    """
    checker = LineChecker(_MAX_LINE_BYTES)
    stream = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    try:
        for line in read_lines(path, _MAX_LINE_BYTES):
            if line.is_blank:
                continue
            checked = checker.check(line)
            if not isinstance(checked, BatchRequest):
                assert checked.error is not None
                raise InputFileError(f"{path}, line {line.ref.number}: {checked.error.message}")
            body = json.loads(checked.content) | stream | dict(extra)
            yield OfflineRequest(checked.custom_id, checked.url, body)
    finally:
        checker.close()
