"""A request as SGLang's tokenizer process sends it to a scheduler."""

from __future__ import annotations

from array import array
from typing import Any


def tokenized_request(
    tokenizer: Any,
    rid: str,
    prompt: list[int],
    max_new_tokens: int,
    *,
    offline: bool,
    **sampling: Any,
) -> Any:
    """Return a ``TokenizedGenerateReqInput``: greedy, and no EOS, unless ``sampling`` differs."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    marks = {"coserve_class": "offline"} if offline else None
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        **{"temperature": 0.0, "ignore_eos": True, "custom_params": marks, **sampling},
    )
    params.normalize(tokenizer)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
