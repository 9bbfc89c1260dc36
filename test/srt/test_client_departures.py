"""What is ended with a client that leaves, and what goes on when it comes again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_coserve.srt.tokenizer.client_presence import (
    ClientDepartures,
    InterruptedRequests,
    identity_of,
    key_of,
)


def tokenized(prompt: list[int], **params: Any) -> Any:
    """Of SGLang's message to the scheduler, what tells requests from each other."""
    return SimpleNamespace(input_ids=prompt, sampling_params=SamplingParams(**params))


async def test_all_that_a_client_has_is_aborted_when_it_leaves_and_nothing_is_sent_later() -> None:
    aborted: list[str] = []
    departures = ClientDepartures(aborted.append, lambda _rid: None)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async with departures.watched(SimpleNamespace(receive=receive)):
        for rid in ("a", "b"):
            departures.sending(rid)
        await asyncio.sleep(0.01)
        assert aborted == ["a", "b"]
        with pytest.raises(ValueError, match="its client has left"):
            departures.sending("late")


def test_only_the_same_request_goes_on() -> None:
    key = key_of({"idempotency-key": "k", "x-request-id": "r"})
    assert (
        key == key_of({"idempotency-key": "k"}) != key_of({"x-request-id": "k", "x-api-key": "a"})
    )
    assert key is not None
    assert key_of({"idempotency-key": ""}) is None
    same = tokenized([1, 2], custom_params={"coserve_class": "offline"})
    others = [tokenized([1, 2, 3]), tokenized([1, 2], temperature=0.5), tokenized([1])]
    identities = {identity_of(key, each, "") for each in (tokenized([1, 2]), same, *others)}
    assert len(identities) == 4
    assert identity_of(key, same, "other weights") not in identities


def test_what_is_kept_is_bounded_in_time_and_size() -> None:
    now_s = 0.0
    kept = InterruptedRequests(lambda: now_s)
    kept.keep(b"a", [1, 2, 3], [])
    now_s = 4000.0
    assert kept.take(b"a") == []
    for number in range(5000):
        kept.keep(number.to_bytes(2), [1, 2], [])
    assert kept.take((0).to_bytes(2)) == []
    assert kept.take((4999).to_bytes(2)) == [1]
    kept.keep(b"large", [1] * 1_000_000, [])
    kept.keep(b"larger", [1] * 1_000_000, [])
    assert kept.take(b"large") == []
    assert len(kept.take(b"larger")) == 999_999
    assert kept.take(b"larger") == [], "once"
    kept.keep(b"cut off again", [], [7, 8, 9])  # Before the first of them came back.
    assert kept.take(b"cut off again") == [7, 8, 9]
    kept.keep(b"cut off later", [7, 8, 5, 6], [7, 8])
    assert kept.take(b"cut off later") == [7, 8, 5]
