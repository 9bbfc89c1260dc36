"""Models on the CPU path: what the engine generates is what transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.small_model import ARCHITECTURES, SmallModelSpec, make_small_model
from srt.scripted_engine import EngineProcess, EngineSpec, ScriptedEngine

PROMPT = list(range(20, 90))
MAX_NEW_TOKENS = 24


def generate_as_both_classes(engine: ScriptedEngine) -> tuple[list[int], list[int]]:
    engine.run([engine.request("on", PROMPT, MAX_NEW_TOKENS)])
    engine.run([engine.request("off", PROMPT, MAX_NEW_TOKENS, offline=True)])
    engine.assert_nothing_leaked()
    return engine.output("on"), engine.output("off")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_generates_what_transformers_does(architecture: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    spec = SmallModelSpec(architecture=architecture, hidden=64, layers=2, context=512)
    make_small_model(tmp_path, spec)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        output = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=MAX_NEW_TOKENS,
            min_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
    expected = output[0, len(PROMPT) :].tolist()

    settings = (("chunked_prefill_size", 32), ("max_total_tokens", 2048))
    process = EngineProcess(EngineSpec(tmp_path, server_args=settings))
    try:
        assert process.call(generate_as_both_classes) == (expected, expected)
    finally:
        process.close()
