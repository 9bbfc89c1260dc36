"""Routes that render or tokenize by themselves do it beside the event loop, as SGLang does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from srt.batch_backend.served import LONG_TEXT, Served
from srt.batch_backend.test_event_loop import Watched
from srt.batch_backend.test_event_loop import watched as watched

TEXT = LONG_TEXT[:2400]
LARGE, SMALL = 1 << 20, 100


def raw_request(body_bytes: int) -> Request:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    return Request({**scope, "coserve_body_bytes": body_bytes})


@pytest.fixture
def handlers(served: Served) -> Any:
    """SGLang's handlers as its app makes them, with ours in their places."""
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.entrypoints.openai.serving_tokenize import (
        OpenAIServingDetokenize,
        OpenAIServingTokenize,
    )

    from sglang_coserve.guard.threaded_handlers import replace_handlers

    manager, templates = served.manager, served.engine.template_manager

    async def startup() -> Any:
        state = SimpleNamespace(
            openai_serving_tokenize=OpenAIServingTokenize(manager, templates),
            openai_serving_detokenize=OpenAIServingDetokenize(manager),
            anthropic_serving=AnthropicServing(manager.serving_chat_class(manager, templates)),
            openai_serving_responses=OpenAIServingResponses(manager, templates),
        )
        replace_handlers(state)
        return state

    return served.do(startup())


def tokenize(handlers: Any, text: str, raw: Request) -> Any:
    from sglang.srt.entrypoints.openai.protocol import TokenizeRequest

    request = TokenizeRequest(model="small", prompt=text)
    return handlers.openai_serving_tokenize.handle_request(request, raw)


def tokenize_chat(handlers: Any, text: str, raw: Request) -> Any:
    from sglang.srt.entrypoints.openai.protocol import TokenizeRequest

    request = TokenizeRequest(model="small", messages=[{"role": "user", "content": text}])
    return handlers.openai_serving_tokenize.handle_request(request, raw)


def respond(handlers: Any, text: str, raw: Request) -> Any:
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    request = ResponsesRequest(model="small", input=text, max_output_tokens=4, temperature=0)
    return handlers.openai_serving_responses.create_responses(request, raw)


def message(handlers: Any, text: str, raw: Request) -> Any:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    messages = [{"role": "user", "content": text}]
    request = AnthropicMessagesRequest(
        model="small", messages=messages, max_tokens=4, temperature=0
    )
    return handlers.anthropic_serving.handle_messages(request, raw)


def count_tokens(handlers: Any, text: str, raw: Request) -> Any:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest

    messages = [{"role": "user", "content": text}]
    request = AnthropicCountTokensRequest(model="small", messages=messages)
    return handlers.anthropic_serving.handle_count_tokens(request, raw)


CALLS = (tokenize, tokenize_chat, respond, message, count_tokens)


def said(response: Any) -> Any:
    """What an answer says, without what differs from one to the next."""
    assert getattr(response, "status_code", 200) == 200
    if hasattr(response, "body"):
        found = orjson.loads(response.body)
    else:
        found = orjson.loads(response.model_dump_json())
    for name in ("id", "created_at", "total_duration", "eval_duration", "output", "load_duration"):
        found.pop(name, None)
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_large_request_is_answered_as_a_small_one_but_from_a_thread(
    served: Served, handlers: Any, watched: Watched, call: Any
) -> None:
    small = said(served.do(call(handlers, TEXT, raw_request(SMALL))))
    watched.threads.clear()
    assert said(served.do(call(handlers, TEXT, raw_request(LARGE)))) == small
    assert watched.threads
    assert "MainThread" not in watched.threads, "where the event loop runs"
    served.assert_nothing_left()


@pytest.mark.parametrize("call", [respond, message], ids=lambda call: call.__name__)
def test_a_text_longer_than_any_prompt_is_a_bad_request(
    served: Served, handlers: Any, call: Any
) -> None:
    response = served.do(call(handlers, LONG_TEXT, raw_request(LARGE)))
    assert response.status_code == 400
    assert b"longer than the" in response.body
    served.assert_nothing_left()


def test_tokens_become_text_in_a_thread(served: Served, handlers: Any) -> None:
    from sglang.srt.entrypoints.openai.protocol import DetokenizeRequest

    ids = served.manager.tokenizer.encode(TEXT, add_special_tokens=False)
    request = DetokenizeRequest(model="small", tokens=ids)
    for body_bytes in (SMALL, LARGE):
        raw = raw_request(body_bytes)
        response = served.do(handlers.openai_serving_detokenize.handle_request(request, raw))
        assert said(response)["text"] == TEXT


def test_a_query_before_very_many_items_is_refused(served: Served) -> None:
    """SGLang would put it before each of them at once."""
    scoring = served.manager.score_request("q" * 20_000, ["a"] * 5_000, label_token_ids=[1])
    with pytest.raises(ValueError, match="send fewer items at once"):
        served.do(scoring)
    few = served.do(served.manager.score_request("q", ["a", "b"], label_token_ids=[1, 2]))
    assert len(few.scores) == 2
