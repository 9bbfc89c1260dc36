"""Synthetic prompts share the prefixes their trace says they share, and no others."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.workload.shape import prompt_token_ids
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest

VOCAB = 32_000


def tokens(index: int, prompt_tokens: int, *hash_ids: int, seed: int = 0) -> np.ndarray:
    request = TraceRequest(index, 0.0, prompt_tokens, 1, hash_ids)
    return prompt_token_ids(request, vocab_size=VOCAB, seed=seed)


def same(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.mean(a == b))


@st.composite
def requests(draw: st.DrawFn) -> TraceRequest:
    prompt_tokens = draw(st.integers(0, 4 * BLOCK_TOKENS))
    hash_ids = draw(st.lists(st.integers(0, 2**63 - 1), max_size=-(-prompt_tokens // BLOCK_TOKENS)))
    return TraceRequest(draw(st.integers(0, 10**9)), 0.0, prompt_tokens, 1, tuple(hash_ids))


def test_equal_ids_give_equal_blocks_wherever_they_stand():
    a, b = tokens(0, 1024, 7, 8), tokens(1, 900, 8, 7)
    assert np.array_equal(a[:388], b[512:])  # A partial block is the begin of the whole one.
    assert np.array_equal(a[512:], b[:512])
    assert same(a[:512], a[512:]) < 0.01


def test_tokens_without_an_id_are_shared_with_no_one():
    a, b = tokens(0, 1500, 3), tokens(1, 1500, 3)
    assert np.array_equal(a[:512], b[:512])
    assert same(a[512:], b[512:]) < 0.01
    # Request 3 and block 3 are different sources.
    assert same(tokens(3, 512), tokens(0, 512, 3)) < 0.01


def test_known_values():
    """The prompts behind published numbers must not change unnoticed."""
    assert tokens(0, 4, 7).tolist() == [4334, 24836, 18304, 27115]
    assert tokens(1, 4).tolist() == [17900, 3100, 29986, 351]
    known = hashlib.sha256()
    for seed, vocab_size in ((0, VOCAB), (-1, 2**31)):
        request = TraceRequest(5, 0.0, 1500, 1, (1, 2))
        ids = prompt_token_ids(request, vocab_size=vocab_size, seed=seed, first_token_id=10)
        known.update(ids.tobytes())
    assert known.hexdigest()[:16] == "c97b0b8b88bf8bf4"


@given(requests(), st.integers(), st.integers(0, 50), st.integers(1, 10**6))
def test_length_and_range_hold_for_any_request(request, seed, first, span):
    ids = prompt_token_ids(request, vocab_size=first + span, seed=seed, first_token_id=first)
    assert ids.shape == (request.prompt_tokens,)
    assert ids.dtype == np.int64
    assert ((first <= ids) & (ids < first + span)).all()
