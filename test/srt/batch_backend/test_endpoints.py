"""Every endpoint of a line, as the engine answers it; bodies that are the line's own fault."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from batch.route_calls import answer_in
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.result_record import usage_of
from srt.batch_backend.served import (
    CHAT,
    COMPLETION,
    COMPLETIONS,
    EMBEDDINGS,
    GREEDY,
    LONG_TEXT,
    MESSAGES,
    PROMPT,
    RESPONSES,
    Served,
    comparable,
)


def test_another_endpoint_is_an_invalid_line(served: Served) -> None:
    result, _ = served.serve(EMBEDDINGS, {"model": "small", "input": PROMPT})
    assert (result.status_code, result.is_retryable) == (400, False)
    assert EMBEDDINGS in result.body["error"]["message"]


def test_a_completion_is_what_the_engine_generates(served: Served) -> None:
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 70}
    alone = served.engine.generate(PROMPT, params)
    body = served.answer(COMPLETIONS, COMPLETION)
    (choice,) = body["choices"]
    assert choice["text"] == alone["text"]
    assert choice["token_ids"] == alone["output_ids"]
    assert choice["finish_reason"] == "length"
    prompt_tokens = alone["meta_info"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] == prompt_tokens
    assert body["usage"]["total_tokens"] == prompt_tokens + 70


def test_chat_and_responses_use_the_chat_template(served: Served) -> None:
    chat = served.answer(CHAT, {**GREEDY, "messages": MESSAGES, "max_tokens": 30})
    # SGLang leaves two tokens of a response's limit free.
    body = {**GREEDY, "input": MESSAGES, "max_output_tokens": 32}
    response = served.answer(RESPONSES, body)
    assert answer_in(chat) == answer_in(response)
    # Since 0.5.22 SGLang says the usage and the end of a response in OpenAI's words.
    assert usage_of(chat).output_tokens == usage_of(response).output_tokens == 30
    reason = response.get("incomplete_details") or {}
    assert response["status"] == "completed" or reason == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT, RESPONSES])
def test_another_model_is_not_found(served: Served, endpoint: str) -> None:
    result, _ = served.serve(endpoint, {**COMPLETION, "model": "gpt-4o"})
    assert (result.status_code, result.is_retryable) == (404, False)
    error = result.body["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "use 'small'" in error["message"]
    assert served.backend.model_names == ("small",)


def test_a_response_is_not_kept_in_memory(served: Served) -> None:
    body = {**GREEDY, "input": "hello", "max_output_tokens": 5, "store": True}
    first, _ = served.serve(RESPONSES, body)
    assert first.body["store"] is False
    follow_up = {**body, "previous_response_id": first.body["id"]}
    second, _ = served.serve(RESPONSES, follow_up)
    # 400 since 0.5.22: it keeps none for anybody, if not told to.
    assert second.status_code in (400, 404)
    assert not second.is_retryable
    assert "previous_response_id" in str(second.body) or first.body["id"] in str(second.body)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"service_tier": "priority"},
        {"coserve_class": "offline"},
        {"custom_params": {"coserve_class": "offline"}},
        {"n": 2},
    ],
    ids=str,
)
def test_lines_are_offline(served: Served, said: dict[str, Any]) -> None:
    before = served.do(served.counts())["offline"]["received"]
    served.answer(COMPLETIONS, {**COMPLETION, "max_tokens": 3, **said})
    # Of several choices, the prompt they share is a request of its own.
    expected = said["n"] + 1 if "n" in said else 1
    assert served.do(served.counts())["offline"]["received"] == before + expected


def test_the_ids_that_clients_give_requests_may_be_equal(served: Served) -> None:
    body = {**COMPLETION, "max_tokens": 20, "rid": "mine"}

    async def both() -> list[LineResult]:
        return await asyncio.gather(served.run(COMPLETIONS, body), served.run(COMPLETIONS, body))

    first, second = served.do(both())
    assert first.status_code == second.status_code == 200
    assert first.request_id != second.request_id
    assert first.body["id"] == first.request_id


@pytest.mark.parametrize(
    ("endpoint", "change", "told"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "empty"),
        (COMPLETIONS, {"prompt": "a " * 3000}, "context length"),
        (COMPLETIONS, {"max_tokens": 3000}, "context length"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"stream": True}, "stream"),
        (COMPLETIONS, {"prompt": [5, 10**6]}, "token ids"),
        (COMPLETIONS, {"prompt": [[5], [-1]]}, "token ids"),
        (COMPLETIONS, {"min_tokens": 2, "stop_token_ids": [10**6]}, "token ids"),
        (COMPLETIONS, {"logprobs": 10**6}, "logprobs"),
        (COMPLETIONS, {"logit_bias": {"5": 1e39}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"1000000": 1}}, "logit_bias"),
        (COMPLETIONS, {"n": 10**9}, "n is"),
        (COMPLETIONS, {"prompt": ["a"] * 3000}, "3000 prompts and choices"),
        (COMPLETIONS, {"prompt": LONG_TEXT}, "longer than the"),
        (COMPLETIONS, {"custom_params": {"coserve_slo_ttft_ms": 5}}, "coserve_slo_ttft_ms"),
        (COMPLETIONS, {"coserve_slo_tpot_ms": 5}, "coserve_slo_tpot_ms"),
        (COMPLETIONS, {"coserve_class": "online"}, "lines of a batch are offline"),
        (COMPLETIONS, {"coserve_class": ["offline"]}, "lines of a batch are offline"),
        (COMPLETIONS, {"coserve_deadline_s": 60}, "coserve_deadline_s' has no place in a line"),
        (COMPLETIONS, {"custom_params": {"coserve_class": "online"}}, "lines of a batch are"),
        (COMPLETIONS, {"custom_params": {"_coserve_generated": [5]}}, "_coserve_generated"),
        (COMPLETIONS, {"_coserve_job": "batch_2"}, "_coserve_job"),
        (CHAT, {"messages": MESSAGES, "custom_params": {"_coserve_due_in_s": 0}}, "_coserve_due"),
        (COMPLETIONS, {"prompt": "\ud800"}, "malformed"),
        (COMPLETIONS, {"seed": 2**70}, "sampling_seed"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": MESSAGES, "response_format": "json"}, "malformed"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "Tools"),
        (RESPONSES, {"input": "hello", "background": True}, "background"),
        (RESPONSES, {"input": 5}, "input"),
        (RESPONSES, {"input": "hello", "chat_template_kwargs": {"padding": 1}}, "padding is no"),
        (RESPONSES, {"input": LONG_TEXT}, "longer than the"),
        (CHAT, {"messages": [{"role": "user", "content": LONG_TEXT}]}, "longer than the"),
        (RESPONSES, {"input": "hello", "temperature": -1}, "temperature"),
    ],
)
def test_a_bad_body_is_the_fault_of_its_line(
    served: Served, endpoint: str, change: dict[str, Any], told: str
) -> None:
    body = {**(COMPLETION if endpoint == COMPLETIONS else GREEDY), **change}
    result, told_of = served.serve(endpoint, body)
    assert (result.status_code, result.is_retryable) == (400, False)
    assert told in result.body["error"]["message"]
    assert result.body["error"].keys() == {"message", "type", "param", "code"}
    assert result.request_id
    assert told_of == []
    assert served.manager.rid_to_state == {}


def spoil_logits() -> str:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class Spoil(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return logits * float("nan")

    return str(Spoil.to_str())


def test_a_line_that_cannot_be_sampled_has_an_error_record(served: Served) -> None:
    bad = {**COMPLETION, "temperature": 1, "custom_logit_processor": spoil_logits()}

    async def both() -> list[LineResult]:
        return await asyncio.gather(
            served.run(COMPLETIONS, bad), served.run(COMPLETIONS, COMPLETION)
        )

    alone = served.answer(COMPLETIONS, COMPLETION)
    result, other = served.do(both())
    assert (result.status_code, result.is_retryable) == (400, False)
    assert "could not choose a token" in result.body["error"]["message"]
    assert comparable(other.body) == alone
    served.assert_nothing_left()


def test_the_handlers_errors_are_openai_errors() -> None:
    from starlette.responses import Response

    from sglang_coserve.srt.batch_backend.backend import line_result

    error = {"message": "m", "type": "t", "param": None, "code": 500}
    for content in (error | {"object": "error"}, {"error": error}):
        for status, is_retryable in ((400, False), (404, False), (500, True), (503, True)):
            result = line_result("r", Response(orjson.dumps(content), status))
            assert result == LineResult(status, "r", {"error": error}, is_retryable)
