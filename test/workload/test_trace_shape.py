"""Slicing, scaling, thinning and cutting traces."""

import math
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.shape import fit_to_context, scale_rate, until
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest


def every_second(prompt_tokens: int = 100, output_tokens: int = 10):
    """An endless trace: whoever reads on beyond need never returns."""
    return (TraceRequest(i, float(i), prompt_tokens, output_tokens) for i in count())


class TestUntil:
    def test_ends_before_its_end_and_reads_no_further(self):
        requests = list(until(every_second(), 3))
        assert [(r.index, r.arrival_s) for r in requests] == [(0, 0.0), (1, 1.0), (2, 2.0)]

    @pytest.mark.parametrize("end_s", [0, -1, math.nan])
    def test_refuses_what_is_no_time_at_once(self, end_s):
        with pytest.raises(ConfigError, match="until"):
            until(every_second(), end_s)


class TestRate:
    def test_compressing_time_keeps_the_requests(self):
        scaled = list(islice(scale_rate(every_second(), 4.0), 9))
        assert [r.arrival_s for r in scaled] == [i / 4 for i in range(9)]
        assert [r.index for r in scaled] == list(range(9))

    @pytest.mark.parametrize("factor", [0, -1, math.inf, math.nan])
    def test_refuses_a_factor_that_is_no_rate(self, factor):
        with pytest.raises(ConfigError, match="rate factor"):
            scale_rate(every_second(), factor)


class TestFitToContext:
    def test_prompts_give_way_to_outputs_at_their_end(self):
        request = TraceRequest(0, 0.0, 3 * BLOCK_TOKENS, 100, hash_ids=(4, 5, 6))
        (fitted,), _ = fit_to_context([request], 2 * BLOCK_TOKENS)
        assert fitted == TraceRequest(0, 0.0, 2 * BLOCK_TOKENS - 100, 100, hash_ids=(4, 5))

    def test_it_says_what_was_left_out_and_cut(self):
        lengths = [(0, 0), (5, 0), (0, 5), (5, 5), (90, 129), (90, 10)]
        requests = [TraceRequest(i, float(i), *pair) for i, pair in enumerate(lengths)]
        fitted, done = fit_to_context(requests, 100)
        assert [request.index for request in fitted] == [3, 4, 5]
        assert done == "3 requests, 3 failed ones left out, 1 cut to 100 tokens"

    @pytest.mark.parametrize("context", [1, 0, -3])
    def test_limits_that_leave_no_room(self, context):
        with pytest.raises(ConfigError, match="limit"):
            fit_to_context([], context)

    @given(
        lengths=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000))),
        context=st.integers(2, 4000),
    )
    def test_everything_fits_and_no_more_is_cut_than_must_be(self, lengths, context):
        requests = [
            TraceRequest(i, float(i), p, o, tuple(range(-(-p // BLOCK_TOKENS))))
            for i, (p, o) in enumerate(lengths)
        ]
        fitted, _ = fit_to_context(requests, context)
        for r in fitted:
            assert r.prompt_tokens >= 1
            assert r.output_tokens >= 1
            assert r.prompt_tokens + r.output_tokens <= context
            assert len(r.hash_ids) == -(-r.prompt_tokens // BLOCK_TOKENS)
        served = [r for r in requests if r.prompt_tokens and r.output_tokens]
        assert [r.index for r in served] == [r.index for r in fitted]
        for before, after in zip(served, fitted, strict=True):
            whole = before.prompt_tokens + before.output_tokens
            assert after.prompt_tokens + after.output_tokens == min(whole, context)
