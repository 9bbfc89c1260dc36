"""What the steps on a GPU are given: a model's tokenizer."""

from __future__ import annotations

from pathlib import Path

from gpu.llama_shape import CONFIG, write_llama_shape


def test_every_token_of_the_llama_shape_has_a_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_llama_shape(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == CONFIG["vocab_size"]
    for token in (5000, 100_000, CONFIG["vocab_size"] - 1):
        assert tokenizer.decode([token]).strip() == f"filler{token}"
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"
