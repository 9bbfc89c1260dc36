"""Which requests of the engine an id means."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from asgi_correlation_id import correlation_id

from sglang_coserve.srt.tokenizer import request_ids
from sglang_coserve.srt.tokenizer.request_ids import RequestIds


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    token = correlation_id.set(None)
    yield
    correlation_id.reset(token)


def test_an_id_of_a_client_means_all_its_requests() -> None:
    ids = RequestIds()
    ids.sending("without-a-client")
    correlation_id.set("sent")
    ids.sending("a")
    ids.sending("b")
    assert ids.engine_ids("sent") == ["a", "b", "sent"]
    assert ids.engine_ids("a") == ["a"]


def test_a_line_of_a_batch_has_one_id() -> None:
    ids = RequestIds()
    correlation_id.set("line")
    ids.sending("line")
    assert ids.engine_ids("line") == ["line"]


def test_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_ids, "_MOST_IDS", 2)
    ids = RequestIds()
    for sent in ("old", "kept", "old", "new"):
        correlation_id.set(sent)
        for number in range(20):
            ids.sending(f"{sent}-{number}")
    assert ids.engine_ids("kept") == ["kept"]
    assert len(ids.engine_ids("old")) == 17
    assert ids.engine_ids("new")[0] == "new-4"
