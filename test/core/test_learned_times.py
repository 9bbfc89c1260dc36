"""How long an offline request will run, and what offline work alone is expected to get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.offline_queue.offline_requests import offline
from core.scheduler.scenarios import MODEL
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.learned_times import ServiceTime, expected_tokens_per_s, lines_at_a_time
from sglang_coserve.core.step import StepResult
from sglang_coserve.core.step_stats import StepStats

REQUEST = offline("r", range(100))
PREFILL_S = MODEL.predict(StepStats().with_prefill(100, 0))


def decode(started_s: float, seconds: float = 0.01) -> StepResult:
    return StepResult(0, started_s, seconds, StepStats.of(decodes=[100, 100]))


def observed(*results: StepResult) -> ServiceTime:
    service = ServiceTime()
    for result in results:
        service.observe(result, is_busy=True)
    return service


def test_before_anything_ran_the_model_tells() -> None:
    token_s = MODEL.predict(StepStats().with_decode(100))
    assert observed().predict(REQUEST, MODEL) == pytest.approx(PREFILL_S + 100 * token_s)


def test_the_time_between_steps_counts_and_not_that_of_a_step() -> None:
    """A step of 10 ms every 0.5 s: online work took the rest."""
    service = observed(decode(0.0), decode(0.5), decode(1.0))
    assert service.predict(REQUEST, MODEL) == pytest.approx(PREFILL_S + 100 * 0.5)


def test_steps_without_offline_decodes_do_not_count() -> None:
    prefill = StepResult(0, 0.75, 0.01, StepStats.of(prefills=[(10, 0)]))
    service = observed(decode(0.0), decode(0.5), prefill, decode(1.0))
    assert service.predict(REQUEST, MODEL) == pytest.approx(PREFILL_S + 100 * 0.5)


def test_time_without_offline_requests_is_no_wait_for_a_token() -> None:
    service = observed(decode(0.0), decode(0.5))
    service.observe(decode(0.6), is_busy=False)
    service.observe(decode(1000.0), is_busy=True)
    service.observe(decode(1000.5), is_busy=True)
    assert service.predict(REQUEST, MODEL) == pytest.approx(PREFILL_S + 100 * 0.5)


def test_what_is_expected_counts_and_what_was_generated_does_not() -> None:
    service = observed(decode(0.0), decode(0.5))
    short = replace(REQUEST, expected_output_tokens=20)
    assert service.predict(short, MODEL) == pytest.approx(PREFILL_S + 20 * 0.5)
    begun = replace(short, num_generated_tokens=15)
    prefill_s = MODEL.predict(StepStats().with_prefill(115, 0))
    assert service.predict(begun, MODEL) == pytest.approx(prefill_s + 5 * 0.5)
    longer = replace(short, num_generated_tokens=60)
    prefill_s = MODEL.predict(StepStats().with_prefill(160, 0))
    assert service.predict(longer, MODEL) == pytest.approx(prefill_s + 0.5)


EVEN = PolynomialModel.of(compute_token_s=1e-4, iteration_s=4e-3)
LARGE = {"kv_tokens": 1 << 20, "max_requests": 64, "chunk_tokens": 2048}


def test_the_rate_is_that_of_prompts_and_decodes_in_full_batches() -> None:
    # 256 prompt tokens in an eighth of a step, 256 more in as many steps of 64 requests.
    prefill_s = 256 * 1e-4 + 4e-3 / 8
    decode_s = 256 * (1e-4 + 4e-3 / 64)
    assert expected_tokens_per_s(EVEN, **LARGE) == pytest.approx(512 / (prefill_s + decode_s))


def test_little_memory_few_requests_and_short_chunks_make_it_lower() -> None:
    most = expected_tokens_per_s(EVEN, **LARGE)
    one_request = expected_tokens_per_s(EVEN, **LARGE | {"max_requests": 1})
    assert one_request < expected_tokens_per_s(EVEN, **LARGE | {"max_requests": 8}) < most
    assert expected_tokens_per_s(EVEN, **LARGE | {"kv_tokens": 8 * 512}) < most
    assert expected_tokens_per_s(EVEN, **LARGE | {"chunk_tokens": 16}) < most
    assert expected_tokens_per_s(EVEN, **LARGE | {"kv_tokens": 100}) == pytest.approx(one_request)


def test_lines_fit_by_their_mean_length_and_by_requests() -> None:
    assert lines_at_a_time(kv_tokens=1000, requests=100, lines=2, line_tokens=200) == 10
    assert lines_at_a_time(kv_tokens=1000, requests=7, lines=2, line_tokens=200) == 7
    assert lines_at_a_time(kv_tokens=1000, requests=-1, lines=2, line_tokens=200) == 0
    # Nobody has sent any yet: of middle length.
    assert lines_at_a_time(kv_tokens=1024, requests=100, lines=0, line_tokens=0) == 2
