"""The offline file: JSONL in OpenAI's batch format, read, or made when none is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.input_file import write_lines
from sglang_coserve.errors import InputFileError
from sglang_coserve.jsonl.lines import is_blank, read_lines
from sglang_coserve.jsonl.request_line import BadLineError, parse_request_line
from sglang_coserve.jsonl.seen_ids import SeenIds
from sglang_coserve.streamed_load import StreamedRequest

__all__ = ["OfflineSpec", "read_requests", "write_sample"]

_MAX_LINE_BYTES = 64 << 20


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


def write_sample(path: Path, spec: OfflineSpec, vocab_size: int, seed: int) -> None:
    """Write lines of exactly the lengths in ``spec``, random and without common prefixes."""
    write_lines(
        path,
        spec.lines,
        vocab_size=vocab_size,
        prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
        seed=seed,
    )


def read_requests(path: Path, extra: Mapping[str, Any]) -> Iterator[StreamedRequest]:
    """Yield the requests of a file, checked and marked offline as the client does.

    They are streamed, unlike the client's, so that each token can be counted
    when it comes; ``extra`` is added to each body.

    Raises:
        InputFileError: a line cannot be used.
    """
    offline = {
        "service_tier": "flex",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    with closing(SeenIds()) as seen, path.open("rb") as file:
        for line in read_lines(file, _MAX_LINE_BYTES):
            if is_blank(line.content):
                continue
            try:
                request = parse_request_line(line.content or b"", None)
            except BadLineError as error:
                raise InputFileError(f"{path}, line {line.number}: {error}") from error
            if not seen.add(request.custom_id):
                raise InputFileError(f"{path}, line {line.number}: its custom_id is not unique")
            yield StreamedRequest(
                request.custom_id, request.url, request.body | offline | dict(extra)
            )
