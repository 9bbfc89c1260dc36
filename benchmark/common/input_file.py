"""Batch input files of a chosen length."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import orjson

from sglang_coserve.workload import FIRST_TEXT_TOKEN_ID

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "batch_line",
    "completion_body",
    "long_lines",
    "write_lines",
]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_MAX_PROMPT_CHARS: Final = 2000
"""Of ``long_lines``: more might not fit the model's context."""


def completion_body(prompt: str | list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """Return the body of a greedy completion that does not end early."""
    fields = {"model": "default", "temperature": 0, "ignore_eos": True}
    return {**fields, "prompt": prompt, "max_tokens": max_tokens, **extra}


def batch_line(custom_id: str, body: dict[str, Any]) -> bytes:
    """Return a line of a batch file, with its end."""
    line = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def write_lines(
    path: Path, count: int, *, vocab_size: int, prompt_tokens: int, output_tokens: int, seed: int
) -> None:
    """Write greedy completions of exactly these lengths, with random prompts."""
    rng = random.Random(seed)
    with path.open("wb") as file:
        for number in range(count):
            prompt = rng.choices(range(FIRST_TEXT_TOKEN_ID, vocab_size), k=prompt_tokens)
            file.write(batch_line(f"id-{number}", completion_body(prompt, output_tokens)))


def long_lines(path: Path, count: int, size_bytes: int) -> None:
    """Write ``count`` servable lines of about ``size_bytes`` in all.

    What is too long for a prompt goes into a field that is passed on and ignored.
    """
    bare = len(batch_line(f"id-{count}", completion_body("", 1, user="")))
    text_chars = max(1, size_bytes // count - bare)
    prompt = _text(min(text_chars, _MAX_PROMPT_CHARS))
    rest = _text(text_chars - len(prompt))
    line = batch_line("id-0", completion_body(prompt, 1, user=rest))
    head, tail = line.split(b'"id-0"')
    with path.open("wb", buffering=1 << 20) as file:
        for number in range(count):
            file.write(b'%b"id-%d"%b' % (head, number, tail))


def _text(num_chars: int) -> str:
    return ("words of no meaning " * (num_chars // 20 + 1))[:num_chars]
