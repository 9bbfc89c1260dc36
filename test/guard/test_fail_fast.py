"""A body with many faults costs no more than one with a few."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from sglang_coserve.guard.bodies import FailFast, install_fail_fast


class Item(BaseModel):
    type: str = "text"
    text: str
    parts: list[int | str] | None = None


class Body(BaseModel):
    prompt: list[int] | list[list[int]] | str | list[str]
    items: list[Item] = []
    bias: dict[str, float] | None = None


ADAPTER: TypeAdapter[Any] = TypeAdapter(Body)
values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "parts", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.fixed_dictionaries({"prompt": values}, optional={"items": values, "bias": values}))
def test_it_takes_and_gives_what_pydantic_does(body: Any) -> None:
    try:
        expected = ADAPTER.validate_python(body)
    except ValidationError:
        with pytest.raises(ValidationError):
            FailFast(ADAPTER).validate_python(body)
    else:
        assert FailFast(ADAPTER).validate_python(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [None] * 5000},
        {"prompt": [1] * 5000 + ["a"]},
        {"prompt": "a", "items": [{}] * 5000},
        {"prompt": "a", "items": [{"text": "a", "parts": [None] * 5000}]},
        {"prompt": "a", "bias": {str(n): "x" for n in range(5000)}},
    ],
    ids=["prompt", "late", "items", "parts", "keys"],
)
def test_the_faults_are_few(body: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        FailFast(ADAPTER).validate_python(body)
    (*_, last) = caught.value.errors()
    assert caught.value.error_count() <= 10
    # Found one by one, not counted when all were found; an object has no order to stop in.
    assert (last["type"] == "too_many_faults") == ("bias" in body)


def test_the_routes_of_an_application_use_it() -> None:
    app = FastAPI()

    @app.post("/")
    async def route(body: Body) -> int:
        return len(body.prompt)

    install_fail_fast(app)
    with TestClient(app) as client:
        assert client.post("/", json={"prompt": [1, 2]}).json() == 2
        answer = client.post("/", json={"prompt": [None] * 5000})
        assert answer.status_code == 422
        assert len(answer.json()["detail"]) <= 10
        assert app.openapi()["components"]["schemas"]["Body"]
