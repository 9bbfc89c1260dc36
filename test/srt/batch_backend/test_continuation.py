"""Tokens of a line are told of as they come, and a line goes on after them."""

from __future__ import annotations

from typing import Any

import pytest

from batch.route_calls import answer_in
from srt.batch_backend.served import (
    CHAT,
    COMPLETION,
    COMPLETIONS,
    GREEDY,
    MESSAGES,
    PROMPT,
    RESPONSES,
    Served,
    comparable,
)


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
    for num_generated in (9, len(told)):
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
    assert answer_in(whole) == text[: text.index(stop)]
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
    assert answer_in(whole).startswith("é漢🚢 über")
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

    from sglang_coserve.srt.compat.requests import can_continue

    request = GenerateReqInput(text="x", sampling_params={"max_new_tokens": 5})
    assert can_continue(request)
    assert not can_continue(request, {"repetition_penalty": 1.05})
    assert not can_continue(GenerateReqInput(text="x", image_data="y"))
    assert not can_continue(GenerateReqInput(text="x", custom_logit_processor="y"))
    assert not can_continue(GenerateReqInput(text="x", sampling_params={"regex": "a"}))
