"""What the steps on a GPU are given: traces like real ones, and a model's tokenizer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from gpu.llama_shape import CONFIG, write_llama_shape
from gpu.trace_slices import SLICES, write_slice
from sglang_coserve.workload import TraceRequest, read_trace


def uneven(requests: list[TraceRequest]) -> float:
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    return pstdev(gaps) / fmean(gaps)


def test_slices_have_the_lengths_of_their_traces_and_burstgpts_arrivals_are_more_uneven(
    tmp_path: Path,
) -> None:
    slices = {}
    for name, like in SLICES.items():
        requests = slices[name] = list(read_trace(write_slice(tmp_path / name, like)))
        assert fmean(r.prompt_tokens for r in requests) == pytest.approx(
            like.mean_prompt_tokens, rel=0.01
        )
        assert fmean(r.output_tokens for r in requests) == pytest.approx(
            like.mean_output_tokens, rel=0.01
        )
        assert requests[-1].arrival_s > 500
    assert uneven(slices["burstgpt"]) > 1.2 * uneven(slices["azure"])


def test_every_token_of_the_llama_shape_has_a_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_llama_shape(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == CONFIG["vocab_size"]
    for token in (5000, 100_000, CONFIG["vocab_size"] - 1):
        assert tokenizer.decode([token]).strip() == f"filler{token}"
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"
