"""What is heard of an attempt at a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_coserve.http_lines.http_engine import AttemptListener


class Heard(AttemptListener):
    """Keeps what it hears; ``on_tokens`` hears of tokens, too."""

    def __init__(self, on_tokens: Callable[[Sequence[int]], None] = lambda _: None) -> None:
        self.runs: list[str] = []
        self.prompts: list[int] = []
        self.tokens: list[int] = []
        self._on_tokens = on_tokens

    def began(self, run: str) -> None:
        self.runs.append(run)

    def has_prompt(self, tokens: int) -> None:
        self.prompts.append(tokens)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)
        self._on_tokens(token_ids)
