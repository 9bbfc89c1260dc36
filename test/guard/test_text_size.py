"""No text is tokenized that is longer than a request may be, on whatever way it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.guard.text_size import bound_texts
from sglang_coserve.small_model import SmallModelSpec, make_small_model

TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory: Path = tmp_path_factory.mktemp("small") / "model"
    return AutoTokenizer.from_pretrained(make_small_model(directory, SmallModelSpec()))


@pytest.fixture(autouse=True)
def bound(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = next(kind for kind in type(tokenizer).__mro__ if "_encode_plus" in vars(kind))
    monkeypatch.setattr(kind, "_encode_plus", vars(kind)["_encode_plus"])  # Undone at the end.
    bound_texts(tokenizer, lambda: 5)
    bound_texts(tokenizer, lambda: 20)


def ways(tokenizer: Any, text: str) -> list[Any]:
    chat = [{"role": "user", "content": text}]
    return [
        lambda: tokenizer(text),
        lambda: tokenizer([text[:10], text[10:]]),
        lambda: tokenizer([(text, "")]),
        lambda: tokenizer.encode(text),
        lambda: tokenizer.tokenize(text),
        lambda: tokenizer.apply_chat_template(chat, chat_template=TEMPLATE, tokenize=True),
    ]


@pytest.mark.parametrize("way", range(6))
def test_a_long_text_is_refused_with_its_length(tokenizer: Any, way: int) -> None:
    ways(tokenizer, "x" * 20)[way]()
    with pytest.raises(ValueError, match=r"21 characters: one request may have 20"):
        ways(tokenizer, "x" * 21)[way]()


def test_a_model_without_a_tokenizer_has_no_bound() -> None:
    bound_texts(None, lambda: 1)
