"""The generated model: deterministic, complete, and with outputs that vary."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.errors import ConfigError
from sglang_coserve.small_model import ARCHITECTURES, SmallModelSpec, make_small_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_outputs_vary(architecture: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = SmallModelSpec(architecture=architecture, hidden=64, layers=2, context=512)
    make_small_model(tmp_path, spec)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == architecture
    prompt = torch.arange(20, 40)[None]
    with torch.no_grad():
        output = model.generate(prompt, max_new_tokens=100, do_sample=False, min_new_tokens=100)
    generated = output[0, 20:].tolist()
    assert len(set(pairwise(generated))) > 80
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert all("\ufffd" not in tokenizer.decode([token]) for token in generated)


def test_the_whole_prompt_decides_the_output(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    make_small_model(tmp_path, SmallModelSpec(hidden=64, layers=2, context=512))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.arange(20, 60)[None]
    other = prompt.clone()
    other[0, 0] += 1  # Only the first of forty tokens differs.
    with torch.no_grad():
        outputs = [
            model.generate(ids, max_new_tokens=20, do_sample=False)[0, 40:].tolist()
            for ids in (prompt, other)
        ]
    assert outputs[0] != outputs[1]


def test_the_same_spec_gives_the_same_files(tmp_path: Path) -> None:
    spec = SmallModelSpec(hidden=64, layers=1)
    first = make_small_model(tmp_path / "a", spec)
    second = make_small_model(tmp_path / "b", spec)
    for path in sorted(first.iterdir()):
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_the_tokenizer_covers_any_text_and_has_a_chat_template(small_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(small_model)
    text = "Naïve façade — 你好 🙂 \x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>\nhi<|end|>\n<|assistant|>\n"


def test_another_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="another model"):
        make_small_model(tmp_path, SmallModelSpec())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"context": 0}, "context"),
        ({"vocab": 100}, "512"),
    ],
)
def test_what_no_model_can_have_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SmallModelSpec(**fields)
