"""A file of offline lines that is long enough for a whole measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

from sglang_coserve.errors import InputFileError

__all__ = ["write_offline_load"]

_LINES_PER_S: Final = 500
"""Twenty times what four CPU cores serve of the bundled sample with the small model."""

_MAX_BYTES: Final = 64 << 20
"""Of a file that is made by repeating another one."""


def write_offline_load(
    source: Path,
    target: Path,
    seconds: float,
    fields: Mapping[str, Any],
    *,
    lines_in_one: int = 1,
) -> int:
    """Write the lines of ``source`` to ``target``, again and again until they last for ``seconds``.

    Each copy's prompts begin differently, so that none is served from another one's
    cache; within a copy they share what they shared. Return the number of lines.

    Args:
        source: JSONL in OpenAI's batch format, which is checked when it is submitted.
        target: The file to write.
        seconds: How long the lines should last.
        fields: Added to the body of each line.
        lines_in_one: How many lines to join for a longer prompt; above 1 all must be chats.

    Raises:
        InputFileError: ``source`` cannot be read, or has no line.
    """
    try:
        texts = [text for text in source.read_text("utf-8").splitlines() if text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputFileError(f"{source}: cannot be read: {reason}") from error
    if not texts:
        raise InputFileError(f"{source}: there is no request in it")
    if lines_in_one > 1:
        starts = range(0, len(texts), lines_in_one)
        texts = [_joined(texts[start : start + lines_in_one]) for start in starts]
    wanted = max(len(texts), round(seconds * _LINES_PER_S / lines_in_one))
    written = written_bytes = 0
    with target.open("w", encoding="utf-8") as file:
        for text in islice(_copies(texts, fields), wanted):
            if written >= len(texts) and written_bytes > _MAX_BYTES:
                break
            written_bytes += file.write(text + "\n")
            written += 1
    return written


def _joined(texts: Sequence[str]) -> str:
    """Return the first line with the messages of all."""
    first, *others = map(json.loads, texts)
    for other in others:
        first["body"]["messages"] += other["body"]["messages"]
    return json.dumps(first, ensure_ascii=False)


def _copies(texts: list[str], fields: Mapping[str, Any]) -> Iterator[str]:
    for number in count():
        for text in texts:
            yield _copy(text, number, fields)


def _copy(text: str, number: int, fields: Mapping[str, Any]) -> str:
    """Return a line as it is if nothing is to be changed of it; a malformed one in any case."""
    if not number and not fields:
        return text
    try:
        line = json.loads(text)
        body = line["body"]
        body.update(fields)
        if number:
            line["custom_id"] = f"{line['custom_id']}-{number}"
            _begin_differently(body, f"Copy {number}. ")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return text
    return json.dumps(line, ensure_ascii=False)


def _begin_differently(body: dict[str, Any], start: str) -> None:
    if isinstance(body.get("prompt"), str):
        body["prompt"] = start + body["prompt"]
        return
    first = body["messages"][0]
    if isinstance(first["content"], str):
        first["content"] = start + first["content"]
