"""What offline work alone is expected to get."""

from __future__ import annotations

import pytest

from sglang_coserve.core.latency_model.linear import CONSERVE, LinearModel
from sglang_coserve.core.learned_times import expected_tokens_per_s

MODEL = LinearModel.of(CONSERVE, compute_token_s=1e-4, iteration_s=4e-3)
LARGE = {"kv_tokens": 1 << 20, "max_requests": 64, "chunk_tokens": 2048}


def test_the_rate_is_that_of_prompts_and_decodes_in_full_batches() -> None:
    # 256 prompt tokens in an eighth of a step, 256 more in as many steps of 64 requests.
    prefill_s = 256 * 1e-4 + 4e-3 / 8
    decode_s = 256 * (1e-4 + 4e-3 / 64)
    assert expected_tokens_per_s(MODEL, **LARGE) == pytest.approx(512 / (prefill_s + decode_s))


def test_little_memory_few_requests_and_short_chunks_make_it_lower() -> None:
    most = expected_tokens_per_s(MODEL, **LARGE)
    one_request = expected_tokens_per_s(MODEL, **LARGE | {"max_requests": 1})
    assert one_request < expected_tokens_per_s(MODEL, **LARGE | {"max_requests": 8}) < most
    assert expected_tokens_per_s(MODEL, **LARGE | {"kv_tokens": 8 * 512}) < most
    assert expected_tokens_per_s(MODEL, **LARGE | {"chunk_tokens": 16}) < most
    assert expected_tokens_per_s(MODEL, **LARGE | {"kv_tokens": 100}) == pytest.approx(one_request)
