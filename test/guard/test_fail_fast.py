"""A body with many faults costs no more than one with a few."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
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
def test_it_takes_and_gives_what_pydantic_does_without_nulls(body: Any) -> None:
    try:
        expected = ADAPTER.validate_python({k: v for k, v in body.items() if v is not None})
    except ValidationError:
        with pytest.raises(ValidationError):
            FailFast(ADAPTER).validate_python(body)
    else:
        assert FailFast(ADAPTER).validate_python(body) == expected


OF_OPENAI = {
    "CompletionRequest": (completion_create_params.CompletionCreateParamsBase, {"prompt": "x"}),
    "ChatCompletionRequest": (
        chat_params.CompletionCreateParamsBase,
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "EmbeddingRequest": (embedding_create_params.EmbeddingCreateParams, {"input": "x"}),
    "ResponsesRequest": (response_create_params.ResponseCreateParamsBase, {"input": "x"}),
}


@pytest.mark.parametrize("name", OF_OPENAI)
def test_a_null_says_what_leaving_the_field_out_says(name: str) -> None:
    from sglang.srt.entrypoints.openai import protocol

    model = getattr(protocol, name)
    params, body = OF_OPENAI[name]
    nullable = {
        field
        for field, hint in get_type_hints(params).items()
        if type(None) in get_args(hint) and field not in body
    }
    optional = {field for field, info in model.model_fields.items() if not info.is_required()}
    nulls = dict.fromkeys(nullable | optional)
    adapter = FailFast(TypeAdapter(model))
    changing = {"rid", "request_id", "created", "created_at"}
    given, left_out = (
        adapter.validate_python(dict(each)).model_dump(exclude=changing)
        for each in (body | nulls, body)
    )
    assert given == left_out


def test_a_null_inside_of_a_field_does_so_too() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

    function = {"name": "f", "description": None, "strict": None, "parameters": None}
    call = {"id": "c", "type": None, "index": None, "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "refusal": None, "audio": None, "name": None}
    body = {
        "messages": [
            {"role": "user", "content": "x", "name": None},
            {**said, "function_call": None, "tool_calls": [call]},
            {"role": "tool", "content": "y", "tool_call_id": "c"},
        ],
        "tools": [{"type": None, "function": function}],
        "stream_options": {"include_usage": None},
    }
    chat = FailFast(TypeAdapter(ChatCompletionRequest)).validate_python(body)
    assert chat.tools[0].type == "function"
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": None, "description": None}
    response = FailFast(TypeAdapter(ResponsesRequest)).validate_python(
        {"input": [{"role": "user", "content": "x", "type": None}], "tools": [tool]}
    )
    assert response.tools[0].strict is False


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
