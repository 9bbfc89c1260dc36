"""Penalties of a request that comes back with output tokens, as if it had never left."""

from __future__ import annotations

import random
from typing import Any

import pytest

VOCAB_SIZE = 300
PENALTIES = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.3},
    {"repetition_penalty": 1.1},
    {"min_new_tokens": 90},
    {
        "frequency_penalty": 0.1,
        "presence_penalty": 0.3,
        "repetition_penalty": 0.9,
        "min_new_tokens": 40,
    },
    {},
]


class Fields:
    """Something with the given attributes, which can be referred to weakly."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def request(params: dict[str, Any], num_tokens: int) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Fields(
        sampling_params=SamplingParams(max_new_tokens=100, **params),
        eos_token_ids=None,
        tokenizer=Fields(additional_stop_token_ids=None, eos_token_id=1),
        origin_input_ids=[3, 9],
        output_ids=random.Random(num_tokens).choices(range(20), k=num_tokens),
    )


def orchestrator(holder: Any) -> Any:
    from sglang.srt.sampling import penaltylib

    names = ("Frequency", "MinNewTokens", "Presence", "Repetition")
    kinds = {getattr(penaltylib, f"Batched{name}Penalizer") for name in names}
    return penaltylib.BatchedPenalizerOrchestrator(VOCAB_SIZE, holder, kinds)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_counted_at_once_are_as_if_counted_one_by_one(overlap: bool) -> None:
    import torch

    import sglang_coserve.srt.engine  # noqa: F401 - SGLang's other modules need its defaults.
    from sglang_coserve.guard.sampling import install_eager_sampling
    from sglang_coserve.srt.steps.paused_requests import restore_penalties

    install_eager_sampling()
    reqs = [request(params, 50 + i) for i, params in enumerate(PENALTIES)]
    batch = Fields(
        reqs=reqs, decoding_reqs=None, chunked_req=None, enable_overlap=overlap, device="cpu"
    )
    batch.sampling_info = Fields(penalizer_orchestrator=orchestrator(batch))
    restore_penalties(batch)
    restored = torch.zeros(len(reqs), VOCAB_SIZE) + torch.linspace(-3, 3, VOCAB_SIZE)
    counted = restored.clone()
    batch.sampling_info.penalizer_orchestrator.apply(restored)
    for row, req in enumerate(reqs):
        alone = Fields(reqs=[req], device="cpu")
        penalties = orchestrator(alone)
        tokens = [req.origin_input_ids[-1], *req.output_ids[:-1]] if overlap else req.output_ids
        for token in tokens:
            penalties.cumulate_output_tokens(torch.tensor([token]))
        penalties.apply(counted[row : row + 1])
    assert torch.equal(restored, counted)
