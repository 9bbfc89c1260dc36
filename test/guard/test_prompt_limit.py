"""Texts that are too long are found out from their beginnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.guard.prompts import PromptLimit


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model)


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.backend_tokenizer = self
        self.num_chars = 0

    def encode_batch_fast(self, texts: list[str], **arguments: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self.inner.backend_tokenizer.encode_batch_fast(texts, **arguments)


@given(text=st.text(max_size=400) | st.text("ab \n", max_size=2000), spare=st.integers(0, 3))
def test_no_text_that_fits_is_refused(tokenizer: Any, text: str, spare: int) -> None:
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    limit = PromptLimit(tokenizer, max(1, num_tokens + spare), truncates=False)
    assert limit.fit(text) == text


def test_a_long_text_is_refused_from_its_beginning(tokenizer: Any) -> None:
    counting = Counting(tokenizer)
    with pytest.raises(ValueError, match="4,000,000 characters is longer than the 100 tokens"):
        PromptLimit(counting, 100, truncates=False).fit("many words" * 400_000)
    assert counting.num_chars <= 100 * 16


def test_a_long_text_of_few_tokens_is_not_refused(tokenizer: Any) -> None:
    tokens = len(tokenizer.encode(" " * 4000, add_special_tokens=False))
    assert PromptLimit(tokenizer, tokens, truncates=False).fit(" " * 4000) == " " * 4000


def test_where_prompts_are_truncated_the_beginning_is_enough(tokenizer: Any) -> None:
    text = "many words " * 10_000
    beginning = PromptLimit(tokenizer, 100, truncates=True).fit(text)
    assert len(beginning) < 2000
    assert tokenizer.encode(beginning)[:100] == tokenizer.encode(text)[:100]
