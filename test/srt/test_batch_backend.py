"""Lines of batches on the real engine: every endpoint, continuation, cancellation, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.batch.backend import LineRequest, LineResult
from sglang_coserve.srt.offline_marks import (
    deadline_of,
    offline_marks,
    restore_generated,
    user_of,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"

TIMEOUT_S = 120
"""For a whole test; nothing that passes comes near it."""

PROMPT = "The ferry left the harbour before the rain."
MESSAGES = [{"role": "user", "content": "Who mended the lamp?"}]
GREEDY = {"model": "small", "temperature": 0, "ignore_eos": True}
COMPLETION = {**GREEDY, "prompt": PROMPT, "max_tokens": 70, "return_token_ids": True}
LONG = {**GREEDY, "prompt": PROMPT, "max_tokens": 900}


class Served:
    """An engine with a backend, driven from outside of its event loop."""

    def __init__(self, engine: Any) -> None:
        from sglang_coserve.srt.batch_backend import BatchBackend

        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.backend = BatchBackend(engine.tokenizer_manager, engine.template_manager)

    def do(self, coroutine: Any) -> Any:
        return self.engine.loop.run_until_complete(asyncio.wait_for(coroutine, TIMEOUT_S))

    def run(
        self,
        endpoint: str,
        body: dict[str, Any],
        on_tokens: Callable[[Sequence[int]], None] = lambda _: None,
        generated: Sequence[int] = (),
    ) -> Any:
        """The coroutine that serves a line."""
        line = LineRequest(
            batch_id="batch_1",
            line=1,
            custom_id="a",
            endpoint=endpoint,
            body=body,
            generated=tuple(generated),
            deadline_s=time.time() + 3600,
            priority=0,
            weight=1.0,
        )
        return self.backend.run(line, on_tokens)

    def serve(
        self, endpoint: str, body: dict[str, Any], generated: Sequence[int] = ()
    ) -> tuple[LineResult, list[int]]:
        """Serve a line; return its result and the tokens that were told of."""
        told: list[int] = []
        result = self.do(self.run(endpoint, body, told.extend, generated))
        return result, told

    def answer(
        self, endpoint: str, body: dict[str, Any], generated: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Serve a line well; return the response without what differs from run to run."""
        result, _ = self.serve(endpoint, body, generated)
        assert (result.status_code, result.is_retryable) == (200, False), result.body
        return comparable(result.body)

    async def counts(self) -> dict[str, dict[str, int]]:
        (state,) = await self.manager.get_internal_state()
        counts: dict[str, dict[str, int]] = state["coserve"]
        return counts

    async def until(self, is_reached: Callable[[dict[str, dict[str, int]]], bool]) -> None:
        while not is_reached(await self.counts()):
            await asyncio.sleep(0.01)

    def assert_nothing_left(self) -> None:
        """No request anywhere, and by the engine's own account no memory in use."""
        self.do(self.until(is_idle))
        assert self.manager.rid_to_state == {}
        # Refused while the engine has anything; what was aborted leaves it in the next pass.
        assert self.do(self.manager.flush_cache(timeout_s=30)).success


def is_idle(counts: dict[str, dict[str, int]]) -> bool:
    return not any(
        counts[name][state]
        for name in ("online", "offline")
        for state in ("waiting", "running", "prefilling")
        if state in counts[name]
    )


def comparable(body: Any) -> Any:
    """A response without ids and times."""
    if isinstance(body, dict):
        left_out = ("id", "created", "created_at")
        return {key: comparable(value) for key, value in body.items() if key not in left_out}
    return [comparable(item) for item in body] if isinstance(body, list) else body


def text_of(body: dict[str, Any]) -> str:
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.fixture(scope="module")
def start(small_model: Path) -> Iterator[Callable[..., Served]]:
    """Starts engines, one at a time: SGLang ends all children of a process with any of them."""
    from sglang_coserve.config import CoserveConfig
    from sglang_coserve.srt.engine import CoserveEngine

    running: dict[tuple[str, bool], Served] = {}

    def start(policy: str = "fifo", *, is_embedding: bool = False) -> Served:
        if (policy, is_embedding) not in running:
            stop()
            engine = CoserveEngine(
                model_path=str(small_model),
                dtype="float32",
                max_total_tokens=4096,
                chunked_prefill_size=64,
                is_embedding=is_embedding,
                coserve_config=CoserveConfig(
                    offline_policy=policy, offline_max_running=4, startup_profile_seconds=0
                ),
            )
            running[policy, is_embedding] = Served(engine)
        return running[policy, is_embedding]

    def stop() -> None:
        for served in running.values():
            served.engine.shutdown()
        running.clear()

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        yield start
    stop()


@pytest.fixture
def served(start: Callable[..., Served]) -> Served:
    return start()


# --- Endpoints ---------------------------------------------------------------------------


def test_the_endpoints_are_those_of_the_model(served: Served) -> None:
    assert served.backend.endpoints == {CHAT, COMPLETIONS, RESPONSES}


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
    assert text_of(chat) == text_of(response)
    assert chat["usage"]["completion_tokens"] == response["usage"]["completion_tokens"] == 30
    assert response["status"] == "completed"


def test_a_response_is_not_kept_in_memory(served: Served) -> None:
    body = {**GREEDY, "input": "hello", "max_output_tokens": 5, "store": True}
    first, _ = served.serve(RESPONSES, body)
    assert first.body["store"] is False
    follow_up = {**body, "previous_response_id": first.body["id"]}
    second, _ = served.serve(RESPONSES, follow_up)
    assert (second.status_code, second.is_retryable) == (404, False)


def test_echo_and_several_prompts(served: Served) -> None:
    prompts = [PROMPT, "Oil for the lamp"]
    body = {**GREEDY, "prompt": prompts, "max_tokens": 4, "echo": True}
    choices = served.answer(COMPLETIONS, body)["choices"]
    alone = [served.answer(COMPLETIONS, {**body, "prompt": prompt}) for prompt in prompts]
    assert [choice["text"] for choice in choices] == [text_of(one) for one in alone]
    assert all(choice["text"].startswith(p) for choice, p in zip(choices, prompts, strict=True))


def test_several_choices(served: Served) -> None:
    body = {**COMPLETION, "n": 3, "max_tokens": 5}
    choices = served.answer(COMPLETIONS, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert {choice["text"] for choice in choices} == {
        text_of(served.answer(COMPLETIONS, {**COMPLETION, "max_tokens": 5}))
    }


def test_lines_are_offline_whatever_their_body_says(served: Served) -> None:
    before = served.do(served.counts())["offline"]["received"]
    online = {"service_tier": "priority", "custom_params": {"coserve_class": "online"}}
    served.answer(COMPLETIONS, {**COMPLETION, "max_tokens": 3, **online})
    assert served.do(served.counts())["offline"]["received"] == before + 1


def test_the_ids_that_clients_give_requests_may_be_equal(served: Served) -> None:
    body = {**COMPLETION, "max_tokens": 20, "rid": "mine"}

    async def both() -> list[LineResult]:
        return await asyncio.gather(served.run(COMPLETIONS, body), served.run(COMPLETIONS, body))

    first, second = served.do(both())
    assert first.status_code == second.status_code == 200
    assert first.request_id != second.request_id
    assert first.body["id"] == first.request_id


# --- Tokens and continuation -------------------------------------------------------------


def test_tokens_are_told_of_as_they_come_but_for_the_last(served: Served) -> None:
    pieces: list[list[int]] = []
    result = served.do(served.run(COMPLETIONS, COMPLETION, lambda ids: pieces.append(list(ids))))
    output_ids = result.body["choices"][0]["token_ids"]
    told = [token for piece in pieces for token in piece]
    assert told == output_ids[: len(told)]
    assert 70 - 16 <= len(told) < 70
    assert len(pieces) > 1


@pytest.mark.parametrize("num_generated", [1, 15, 16, 40, 69])
def test_a_continued_completion_is_the_uninterrupted_one(
    served: Served, num_generated: int
) -> None:
    whole = served.answer(COMPLETIONS, COMPLETION)
    output_ids = whole["choices"][0]["token_ids"]
    result, told = served.serve(COMPLETIONS, COMPLETION, output_ids[:num_generated])
    assert comparable(result.body) == whole
    assert told == output_ids[num_generated : num_generated + len(told)]
    assert told or num_generated > 70 - 16
    served.assert_nothing_left()


def test_a_continued_line_goes_on_after_its_tokens(served: Served) -> None:
    """And does not generate them again: these it would never have chosen."""
    generated = [7, 8, 9] * 20
    result, _ = served.serve(COMPLETIONS, COMPLETION, generated)
    output_ids = result.body["choices"][0]["token_ids"]
    assert output_ids[:60] == generated
    assert len(output_ids) == 70


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {**GREEDY, "messages": MESSAGES, "max_completion_tokens": 60}),
        (CHAT, {**GREEDY, "messages": MESSAGES, "ignore_eos": False}),
        (RESPONSES, {**GREEDY, "input": MESSAGES, "max_output_tokens": 62}),
    ],
    ids=["chat", "chat-to-its-end", "responses"],
)
def test_a_continued_chat_is_the_uninterrupted_one(
    served: Served, endpoint: str, body: dict[str, Any]
) -> None:
    result, told = served.serve(endpoint, body)
    for num_generated in (1, 9, len(told)):
        assert served.answer(endpoint, body, told[:num_generated]) == comparable(result.body)


def test_stop_strings_are_found_across_the_seam(served: Served) -> None:
    """Wherever a generation is cut, before, within and behind the stop string's tokens."""
    (choice,) = served.answer(COMPLETIONS, COMPLETION)["choices"]
    text, output_ids = choice["text"], choice["token_ids"]
    stop = next(
        text[start : start + 9]
        for start in range(60, len(text))
        if text[start : start + 9].isascii() and text.index(text[start : start + 9]) == start
    )
    body = {**COMPLETION, "stop": [stop, "never said"]}
    whole = served.answer(COMPLETIONS, body)
    assert whole["choices"][0]["matched_stop"] == stop
    assert text_of(whole) == text[: text.index(stop)]
    num_tokens = whole["usage"]["completion_tokens"]
    for num_generated in range(num_tokens - 8, num_tokens):
        continued = served.answer(COMPLETIONS, body, output_ids[:num_generated])
        assert continued == whole, f"cut after {num_generated} of {num_tokens} tokens"


def test_a_stop_token_ends_a_continued_line(served: Served) -> None:
    output_ids = served.answer(COMPLETIONS, COMPLETION)["choices"][0]["token_ids"]
    position = next(i for i in range(30, 70) if output_ids[i] not in output_ids[:i])
    body = {**COMPLETION, "stop_token_ids": [output_ids[position]], "ignore_eos": False}
    whole = served.answer(COMPLETIONS, body)
    for num_generated in (1, position):
        generated = whole["choices"][0]["token_ids"][:num_generated]
        assert served.answer(COMPLETIONS, body, generated) == whole


def test_text_cut_within_a_character_is_joined(served: Served) -> None:
    """Tokens are bytes here: decoded apart, the halves of a character are two errors."""
    (ferry_ids,) = served.engine.tokenizer_manager.tokenizer(["é漢🚢 über"]).input_ids
    prompt = {**COMPLETION, "max_tokens": len(ferry_ids) + 5}
    whole = served.answer(COMPLETIONS, prompt, ferry_ids)
    assert text_of(whole).startswith("é漢🚢 über")
    ids = whole["choices"][0]["token_ids"]
    for num_generated in range(1, len(ferry_ids)):
        continued = served.serve(COMPLETIONS, prompt, ids[:num_generated])[0].body
        text = continued["choices"][0]["text"]
        tokenizer = served.engine.tokenizer_manager.tokenizer
        assert text == tokenizer.decode(continued["choices"][0]["token_ids"])


@pytest.mark.parametrize(
    "generated",
    [[5, -1], [5, 10**6], [5] * 70, [5] * 5000],
    ids=["negative", "not-in-vocabulary", "as-many-as-asked-for", "more-than-fit"],
)
def test_tokens_that_cannot_be_its_own_are_generated_again(
    served: Served, generated: list[int]
) -> None:
    result, told = served.serve(COMPLETIONS, COMPLETION, generated)
    assert comparable(result.body) == served.answer(COMPLETIONS, COMPLETION)
    assert told == []


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"logprobs": 1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"min_tokens": 3},
        {"prompt": [PROMPT, PROMPT]},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_what_cannot_be_continued_starts_over(served: Served, extra: dict[str, Any]) -> None:
    body = {**COMPLETION, **extra}
    whole = served.answer(COMPLETIONS, body)
    result, told = served.serve(COMPLETIONS, body, [7, 8, 9])
    assert comparable(result.body) == whole
    assert told == []


def test_incremental_streaming_makes_no_difference(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, told = served.serve(COMPLETIONS, COMPLETION)
    monkeypatch.setattr(served.manager, "incremental_streaming_output", True)
    result, told_of_pieces = served.serve(COMPLETIONS, COMPLETION)
    assert comparable(result.body) == comparable(whole.body)
    assert told_of_pieces == told
    assert served.answer(COMPLETIONS, COMPLETION, told[:20]) == comparable(whole.body)


def test_the_servers_sampling_defaults_count(served: Served) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sglang_coserve.srt.batch_backend.continuation import can_continue

    request = GenerateReqInput(text="x", sampling_params={"max_new_tokens": 5})
    assert can_continue(request)
    assert not can_continue(request, {"repetition_penalty": 1.05})
    assert not can_continue(GenerateReqInput(text="x", image_data="y"))
    assert not can_continue(GenerateReqInput(text="x", custom_logit_processor="y"))
    assert not can_continue(GenerateReqInput(text="x", sampling_params={"regex": "a"}))


# --- Cancellation and failure ------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, LONG),
        (COMPLETIONS, {**LONG, "n": 2}),
        (COMPLETIONS, {**LONG, "prompt": [PROMPT, "Oil"]}),
        (CHAT, {**GREEDY, "messages": MESSAGES}),
        (RESPONSES, {**GREEDY, "input": "hello", "max_output_tokens": 900}),
    ],
    ids=["completion", "choices", "prompts", "chat", "responses"],
)
def test_cancelling_a_running_line_leaves_nothing_behind(
    served: Served, endpoint: str, body: dict[str, Any]
) -> None:
    body = {**body, "ignore_eos": True}

    async def begin_and_cancel() -> None:
        line = asyncio.create_task(served.run(endpoint, body))
        await served.until(lambda counts: counts["offline"]["running"] > 0)
        line.cancel()
        with pytest.raises(asyncio.CancelledError):
            await line

    served.do(begin_and_cancel())
    served.assert_nothing_left()


def test_cancelling_waiting_lines_leaves_nothing_behind(served: Served) -> None:
    async def begin_and_cancel() -> None:
        lines = [asyncio.create_task(served.run(COMPLETIONS, LONG)) for _ in range(12)]
        await served.until(lambda counts: counts["offline"]["waiting"] >= 8)
        for line in lines:
            line.cancel()
        results = await asyncio.gather(*lines, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    served.do(begin_and_cancel())
    served.assert_nothing_left()


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, LONG),
        (COMPLETIONS, {**LONG, "n": 2}),
        (RESPONSES, {**GREEDY, "input": "hello", "max_output_tokens": 900}),
    ],
    ids=["completion", "choices", "responses"],
)
def test_what_the_engine_aborts_can_be_tried_again(
    served: Served, endpoint: str, body: dict[str, Any]
) -> None:
    async def begin_and_abort() -> list[LineResult]:
        # More than may run: some are aborted while they wait.
        lines = [asyncio.create_task(served.run(endpoint, body)) for _ in range(6)]
        await served.until(
            lambda counts: counts["offline"]["running"] > 0 and counts["offline"]["waiting"] > 0
        )
        served.manager.abort_request(abort_all=True)
        return await asyncio.gather(*lines)

    for result in served.do(begin_and_abort()):
        assert (result.status_code, result.is_retryable) == (503, True)
        assert result.body["error"]["message"]
        assert result.request_id
    served.assert_nothing_left()


def test_an_abort_before_the_engine_has_the_line_is_no_fault_of_the_line(served: Served) -> None:
    async def abort_while_paused() -> LineResult:
        manager = served.manager
        manager.is_pause = True
        line = asyncio.create_task(served.run(COMPLETIONS, COMPLETION))
        while not manager.rid_to_state:
            await asyncio.sleep(0)
        for state in manager.rid_to_state.values():
            state.abort_requested = True
        async with manager.is_pause_cond:
            manager.is_pause = False
            manager.is_pause_cond.notify_all()
        return await line

    result = served.do(abort_while_paused())
    assert (result.status_code, result.is_retryable) == (503, True)
    served.assert_nothing_left()


def test_whoever_hears_of_tokens_may_fail(served: Served) -> None:
    """The line then counts as failed, and is not left in the engine."""

    def fail(_token_ids: Sequence[int]) -> None:
        raise OSError("the disk is full")

    result = served.do(served.run(COMPLETIONS, LONG, fail))
    assert (result.status_code, result.is_retryable) == (503, True)
    assert "the disk is full" in result.body["error"]["message"]
    served.assert_nothing_left()


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
        (COMPLETIONS, {"custom_params": {"coserve_slo_ttft_ms": 5}}, "coserve_slo_ttft_ms"),
        (COMPLETIONS, {"prompt": "\ud800"}, "surrogates"),
        (COMPLETIONS, {"seed": 2**70}, "64-bit"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": MESSAGES, "response_format": "json"}, "malformed"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "Tools"),
        (RESPONSES, {"input": "hello", "background": True}, "background"),
        (RESPONSES, {"input": 5}, "input"),
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


def test_the_body_of_a_line_is_not_changed(served: Served) -> None:
    """SGLang's models do change what they are given, and a line may be tried again."""
    schema = {"type": "object", "title": "A"}
    body = {
        **GREEDY,
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "schema": schema},
        "temperature": -1,
    }
    before = orjson.dumps(body)
    assert served.serve(CHAT, body)[0].status_code == 400
    assert orjson.dumps(body) == before


def test_the_handlers_errors_are_openai_errors() -> None:
    from starlette.responses import Response

    from sglang_coserve.srt.batch_backend.answer import line_result

    error = {"message": "m", "type": "t", "param": None, "code": 500}
    for content in (error | {"object": "error"}, {"error": error}):
        for status, is_retryable in ((400, False), (404, False), (500, True), (503, True)):
            result = line_result("r", Response(orjson.dumps(content), status))
            assert result == LineResult(status, "r", {"error": error}, is_retryable)


# --- Load --------------------------------------------------------------------------------


def test_the_load_is_known_once_something_was_served(served: Served) -> None:
    served.answer(COMPLETIONS, COMPLETION)
    rate = served.backend.load().offline_tokens_per_s
    assert rate is not None
    assert rate > 0


def test_the_rate_is_that_of_the_time_with_work() -> None:
    from sglang_coserve.srt.batch_backend.token_rate import TokenRate

    now_s = 100.0
    rate = TokenRate(lambda: now_s, window_s=10)
    assert rate.per_s() is None
    with rate.in_flight():
        now_s += 1
        rate.add(50)
        now_s += 1
        assert rate.per_s() == 25
    now_s += 1000  # Idle.
    assert rate.per_s() == 25
    with rate.in_flight(), rate.in_flight():
        now_s += 8
        assert rate.per_s() == 5
        rate.add(100)
        now_s += 2
        assert rate.per_s() == 10  # The first 50 are out of the window.
        now_s += 8
        assert rate.per_s() is None


# --- Marks -------------------------------------------------------------------------------


def request_with(custom_params: Any, **attributes: Any) -> Any:
    """As much of SGLang's ``Req`` as the marks are read from."""
    params = SimpleNamespace(custom_params=custom_params, max_new_tokens=100)
    fresh = {"output_ids": [], "grammar": None, "multimodal_inputs": None, "vocab_size": 50}
    return SimpleNamespace(
        rid="r", sampling_params=params, require_reasoning=False, **{**fresh, **attributes}
    )


def test_marks_are_read_as_they_were_made() -> None:
    req = request_with(offline_marks(due_in_s=-5.5, user="batch_1", generated=(1, 2)))
    assert deadline_of(req, arrival_s=20.0) == 14.5
    assert user_of(req) == "batch_1"
    restore_generated(req, None)
    restore_generated(req, None)
    assert req.output_ids == [1, 2]


@pytest.mark.parametrize("custom_params", [None, {}, {"thinking_budget": 5}])
def test_a_request_without_marks(custom_params: Any) -> None:
    req = request_with(custom_params)
    assert deadline_of(req, 20.0) is None
    assert user_of(req) is None
    restore_generated(req, None)
    assert req.output_ids == []


MALFORMED = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.one_of(st.text(), st.floats()))
)


@given(MALFORMED, MALFORMED, st.one_of(MALFORMED, st.lists(st.integers(), max_size=120)))
def test_malformed_marks_are_taken_for_absent(due: Any, user: Any, generated: Any) -> None:
    """They come in by the same field as a client's."""
    names = list(offline_marks(due_in_s=0, user="", generated=(1,)))[1:]
    req = request_with(dict(zip(names, (due, user, generated), strict=True)))
    deadline_s = deadline_of(req, 20.0)
    assert deadline_s is None or abs(deadline_s) < float("inf")
    assert user_of(req) == (user if isinstance(user, str) else None)
    restore_generated(req, None)
    assert len(req.output_ids) < 100
    assert all(isinstance(token, int) and 0 <= token < 50 for token in req.output_ids)


@pytest.mark.parametrize("state", [{"grammar": object()}, {"multimodal_inputs": object()}])
def test_state_beside_the_tokens_is_not_guessed(state: dict[str, Any]) -> None:
    marks = offline_marks(due_in_s=0, user="batch_1", generated=(1, 2))
    req = request_with(marks, **state)
    restore_generated(req, None)
    assert req.output_ids == []


def test_reasoning_tokens_of_before_are_counted() -> None:
    counted: list[Any] = []
    marks = offline_marks(due_in_s=0, user="batch_1", generated=(1, 2))
    req = request_with(marks, update_reasoning_tokens=lambda *args: counted.append(args))
    req.require_reasoning = True
    restore_generated(req, [9])
    assert counted == [([1, 2], [9])]


# --- Other engines -----------------------------------------------------------------------


def test_embeddings(start: Callable[..., Served]) -> None:
    served = start(is_embedding=True)
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


def test_plans_continue_lines_too(start: Callable[..., Served]) -> None:
    served = start("coserve")
    whole = served.answer(COMPLETIONS, COMPLETION)
    output_ids = whole["choices"][0]["token_ids"]
    for num_generated in (1, 40, 69):
        assert served.answer(COMPLETIONS, COMPLETION, output_ids[:num_generated]) == whole
    foreign, _ = served.serve(COMPLETIONS, COMPLETION, [7, 8, 9] * 20)
    assert foreign.body["choices"][0]["token_ids"][:60] == [7, 8, 9] * 20
    served.assert_nothing_left()
