"""Lines on an embedding model and on a planning scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from srt.batch_backend.served import COMPLETION, COMPLETIONS, EMBEDDINGS, PROMPT, Served


def test_embeddings(start: Callable[..., Served]) -> None:
    served = start("auto", is_embedding=True)
    assert served.backend.endpoints == {EMBEDDINGS}
    inputs = [PROMPT, "Oil for the lamp"]
    body = served.answer(EMBEDDINGS, {"model": "small", "input": inputs})
    expected = [served.engine.encode(text)["embedding"] for text in inputs]
    # Sums are rounded otherwise in a batch of another size.
    for item, embedding in zip(body["data"], expected, strict=True):
        assert item["embedding"] == pytest.approx(embedding, abs=1e-5)
    (one,) = served.answer(EMBEDDINGS, {"model": "small", "input": PROMPT})["data"]
    assert one["embedding"] == pytest.approx(expected[0], abs=1e-5)
    assert body["usage"]["total_tokens"] > 0
    offline = served.do(served.counts())["offline"]
    assert offline["received"] == 3
    served.assert_nothing_left()


@pytest.mark.heavy  # A killed server's lines go on under a planning one in test_interruptions.
def test_plans_continue_lines_too(start: Callable[..., Served]) -> None:
    served = start("coserve")
    whole = served.answer(COMPLETIONS, COMPLETION)
    output_ids = whole["choices"][0]["token_ids"]
    for num_generated in (1, 40, 69):
        assert served.answer(COMPLETIONS, COMPLETION, output_ids[:num_generated]) == whole
    foreign, _ = served.serve(COMPLETIONS, COMPLETION, [7, 8, 9] * 20)
    assert foreign.body["choices"][0]["token_ids"][:60] == [7, 8, 9] * 20
    served.assert_nothing_left()
