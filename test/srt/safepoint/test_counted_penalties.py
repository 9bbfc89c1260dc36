"""What penalties had counted in an aborted step is put back, with SGLang's own penalizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_coserve.srt.safepoint.counted_penalties import CountedPenalties

VOCABULARY = 16
TOKENIZER = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)


def req(rid: str, **params: Any) -> Any:
    return SimpleNamespace(
        rid=rid,
        finished=lambda: False,
        tokenizer=TOKENIZER,
        eos_token_ids=None,
        sampling_params=SamplingParams(max_new_tokens=8, stop_token_ids=[2], **params),
    )


class Decodes:
    """As much of a decode batch as is looked at."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs, self.device, self.forward_mode = reqs, "cpu", ForwardMode.DECODE
        kinds = {BatchedFrequencyPenalizer, BatchedMinNewTokensPenalizer}
        penalties = BatchedPenalizerOrchestrator(VOCABULARY, self, kinds)
        self.sampling_info = SimpleNamespace(penalizer_orchestrator=penalties)

    def prepare(self, *tokens: int) -> None:
        """Count the last tokens, as SGLang does before a step."""
        penalties = self.sampling_info.penalizer_orchestrator
        penalties.cumulate_output_tokens(torch.tensor(tokens))

    def leave(self, rid: str) -> None:
        kept = [place for place, one in enumerate(self.reqs) if one.rid != rid]
        self.reqs = [self.reqs[place] for place in kept]
        self.sampling_info.penalizer_orchestrator.filter(torch.tensor(kept))

    def additive(self) -> torch.Tensor:
        total = torch.zeros(len(self.reqs), VOCABULARY)
        self.sampling_info.penalizer_orchestrator.accumulate_additive_penalties(total)
        return total


def test_a_step_that_is_prepared_twice_counts_once() -> None:
    batch, counted = Decodes([req("a", frequency_penalty=0.5)]), CountedPenalties()
    batch.prepare(7)
    once = batch.additive()
    counted.keep(batch)
    batch.prepare(7)
    assert not torch.equal(batch.additive(), once)
    counted.put_back(batch)
    assert torch.equal(batch.additive(), once)


def test_a_penalty_may_leave_with_the_request_that_asked_for_it() -> None:
    reqs = [req("a", frequency_penalty=0.5), req("b", min_new_tokens=4)]
    batch, counted = Decodes(reqs), CountedPenalties()
    batch.prepare(7, 8)
    once = batch.additive()[:1]
    counted.keep(batch)
    batch.leave("b")
    batch.prepare(7)
    counted.put_back(batch)
    assert torch.equal(batch.additive(), once)
    counted.forget("b")
    assert not len(counted)
