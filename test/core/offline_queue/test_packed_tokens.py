"""Packed tokens: round trip, common prefixes, and what cannot be packed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.offline_queue.offline_requests import num_shared_tokens
from sglang_coserve.core.offline_queue import pack_tokens, unpack_tokens
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES, common_prefix_bytes
from sglang_coserve.errors import RequestError

# The values differ in their first, their last and in all bytes.
token_lists = st.lists(st.sampled_from([0, 1, 1 << 24, 2**32 - 1, 2**62 + 10**6]), max_size=40)


@given(token_lists)
def test_unpacking_gives_the_token_ids_back(token_ids: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(token_ids))) == token_ids


@given(token_lists, token_lists, token_lists, st.data())
def test_common_prefix_ends_at_the_first_token_that_differs(
    shared: list[int], a_rest: list[int], b_rest: list[int], data: st.DataObject
) -> None:
    a, b = shared + a_rest, shared + b_rest
    num_shared = num_shared_tokens(a, b)
    start = data.draw(st.integers(0, num_shared))
    stop = data.draw(st.integers(start, min(len(a), len(b))))

    end_bytes = common_prefix_bytes(
        pack_tokens(a), pack_tokens(b), start * TOKEN_BYTES, stop * TOKEN_BYTES
    )

    assert end_bytes == min(num_shared, stop) * TOKEN_BYTES


@pytest.mark.parametrize("token_ids", [[-1], [2**64], [1.5], ["a"], [None]])
def test_what_is_no_token_id_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(RequestError, match="give token ids as integers from 0"):
        pack_tokens(token_ids)
