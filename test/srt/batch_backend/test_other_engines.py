"""Lines on an embedding model and on a planning scheduler."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest

from srt.batch_backend.served import EMBEDDINGS, PROMPT, Served


def test_embeddings(start: Callable[..., Served]) -> None:
    served = start(is_embedding=True)
    assert served.backend.endpoints == {EMBEDDINGS}
    inputs = [PROMPT, "Oil for the lamp"]
    body = served.answer(EMBEDDINGS, {"model": "small", "input": inputs})
    expected = [served.engine.encode(text)["embedding"] for text in inputs]
    # Sums are rounded otherwise in a batch of another size.
    for item, embedding in zip(body["data"], expected, strict=True):
        assert item["embedding"] == pytest.approx(embedding, abs=1e-5)
    assert served.do(served.counts())["offline"]["received"] == 2

    def ask(**body: object) -> dict[str, Any]:
        return served.answer(EMBEDDINGS, {"model": "small", **body})

    floats = ask(input=inputs, encoding_format=None, dimensions=None, user=None)
    encoded = ask(input=inputs, encoding_format="base64")
    for one, other in zip(floats["data"], encoded["data"], strict=True):
        decoded = struct.unpack(f"<{len(one['embedding'])}f", b64decode(other["embedding"]))
        assert list(decoded) == pytest.approx(one["embedding"], abs=1e-5)
    assert encoded["usage"] == floats["usage"]
    assert floats["usage"]["total_tokens"] == floats["usage"]["prompt_tokens"] > 0
    tokens = served.manager.tokenizer.encode(PROMPT)
    for given in (PROMPT, tokens, [tokens]):
        (one,) = ask(input=given)["data"]
        assert one["embedding"] == pytest.approx(floats["data"][0]["embedding"], abs=1e-5)
    many = ask(input=["Oil"] * 40)
    assert [item["index"] for item in many["data"]] == list(range(40))
    served.assert_nothing_left()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"input": ""}, "empty"),
        ({"input": []}, "empty"),
        ({"input": [""]}, "empty"),
        ({"input": ["Oil", ""]}, "empty"),
        ({"input": [[]]}, "empty"),
        ({"input": [[1], []]}, "empty"),
        ({"input": None}, "input"),
        ({"input": "Oil", "dimensions": 8}, "dimensions"),
        ({"input": "Oil", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["Oil"] * 2049}, "2049"),
    ],
)
def test_an_embedding_of_nothing_is_refused(
    start: Callable[..., Served], body: dict[str, Any], told: str
) -> None:
    served = start(is_embedding=True)
    result, _ = served.serve(EMBEDDINGS, {"model": "small", **body})
    assert (result.status_code, result.is_retryable) == (400, False)
    assert told in result.body["error"]["message"]


def test_vectors_for_tokens_have_the_width_of_the_model(start: Callable[..., Served]) -> None:
    served = start(is_embedding=True)
    tokens, width = served.manager.tokenizer.encode(PROMPT), served.manager.model_config.hidden_size

    def with_vector(vector: list[float]) -> dict[str, Any]:
        vectors = [vector] * tokens.count(tokens[0])
        given = {"embed_override_token_id": tokens[0], "embed_overrides": [vectors]}
        return {"model": "small", "input": [tokens], **given}

    for vector, told in (
        ([0.5] * 3, f"a vector has 3 numbers: use {width}"),
        ([1e300] * width, "not all numbers are finite"),
    ):
        result, _ = served.serve(EMBEDDINGS, with_vector(vector))
        assert (result.status_code, result.is_retryable) == (400, False)
        assert told in result.body["error"]["message"]
    served.answer(EMBEDDINGS, with_vector([0.5] * width))
    served.assert_nothing_left()
