"""What a chat may say of its template and of its calls, in every body that SGLang's routes take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from sglang_coserve.guard import chat_fields
from sglang_coserve.guard.bodies import FailFast
from sglang_coserve.guard.route_table import leaves
from sglang_coserve.srt.cpu import defaults as cpu

if not cpu.has_cuda():
    cpu.set_environment_defaults()

FIELD = "chat_template_kwargs"


def with_template_fields() -> Iterator[type[BaseModel]]:
    """The models of bodies that have variables for a chat template."""
    from sglang.srt.entrypoints.http_server import app

    for route in leaves(app.routes):
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            model = field.field_info.annotation
            if FIELD in getattr(model, "model_fields", ()):
                yield model


def faults(model: type[BaseModel], **variables: Any) -> list[Any]:
    """The faults that are found in the variables, whatever else is missing."""
    try:
        FailFast(TypeAdapter(model)).validate_python({FIELD: variables})
    except ValidationError as error:
        return [fault for fault in error.errors() if fault["loc"][:1] == (FIELD,)]
    return []


def test_no_body_has_an_argument_of_the_renderer() -> None:
    models = set(with_template_fields())
    assert {model.__name__ for model in models} >= {"ChatCompletionRequest", "ResponsesRequest"}
    arguments = chat_fields.template_arguments()
    assert arguments >= {
        *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("tools", "documents", "return_dict", "tokenizer_kwargs"),
    }
    for model in models:
        for name in arguments:
            (fault,) = faults(model, **{"enable_thinking": False, name: 1})
            assert fault["msg"].startswith(f"{name} is no variable of a chat template")


def test_variables_of_a_template_are_taken() -> None:
    for model in with_template_fields():
        assert faults(model, enable_thinking=False, thinking_budget=7, title="x") == []


def test_a_template_is_taken_where_requests_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_fields._Trust, "in_templates", chat_fields._Trust.in_templates)
    chat_fields.trust_templates(are_trusted=True)
    for model in with_template_fields():
        assert faults(model, chat_template="{{ messages }}") == []
        assert faults(model, max_length=10**9) != []


@pytest.mark.parametrize("given", ["", " ", "{}"])
def test_a_call_with_empty_arguments_has_none(given: str) -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": "c"},
    ]
    body = {"messages": messages}
    chat = FailFast(TypeAdapter(ChatCompletionRequest)).validate_python(body)
    assert chat.messages[1].tool_calls[0].function.arguments == "{}"
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": given}
    response = FailFast(TypeAdapter(ResponsesRequest)).validate_python({"input": [item]})
    (said,) = response.input
    assert (said["arguments"] if isinstance(said, dict) else said.arguments) == "{}"
