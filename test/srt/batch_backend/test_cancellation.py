"""Lines that are cancelled, aborted or failed leave nothing in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_coserve.lines.backend import LineRequest, LineResult
from sglang_coserve.srt.batch_backend import BatchBackend, line_manager
from srt.batch_backend.served import (
    CHAT,
    COMPLETION,
    COMPLETIONS,
    GREEDY,
    LONG,
    MESSAGES,
    PROMPT,
    RESPONSES,
    Served,
)


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


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend hears of tokens only when a line ends."""
    monkeypatch.setattr(line_manager, "_STREAM_INTERVAL_TOKENS", 10_000)


@pytest.mark.usefixtures("quiet")
def test_a_cancelled_line_has_told_of_all_its_tokens(served: Served) -> None:
    """Without a stream of them, as after an interval that is not over: they come with the end."""
    heard: list[int] = []

    async def begin_and_cancel() -> None:
        line = asyncio.create_task(served.run(COMPLETIONS, LONG, heard.extend))
        await served.until(lambda counts: counts["offline"]["running"] > 0)
        beside = {**GREEDY, "prompt": "Beside it", "max_tokens": 40}
        await served.run(COMPLETIONS, beside)
        line.cancel()
        with pytest.raises(asyncio.CancelledError):
            await line

    served.do(begin_and_cancel())
    assert 20 < len(heard) < LONG["max_tokens"]
    whole = served.answer(COMPLETIONS, LONG)
    assert served.answer(COMPLETIONS, LONG, generated=heard) == whole
    served.assert_nothing_left()


@pytest.mark.usefixtures("quiet")
def test_a_retracted_line_that_is_cancelled_has_told_of_all_its_tokens(served: Served) -> None:
    """It waits, and no step will ever end for it."""
    heard: list[list[int]] = [[] for _ in range(4)]

    async def online(number: int) -> None:
        params = {"max_new_tokens": 60, "ignore_eos": True}
        await served.engine.async_generate(input_ids=[10 + number] * 930, sampling_params=params)

    async def begin_and_cancel() -> None:
        bodies = [{**LONG, "prompt": f"{number} {PROMPT}"} for number in range(4)]
        lines = [
            asyncio.create_task(served.run(COMPLETIONS, body, tokens.extend))
            for body, tokens in zip(bodies, heard, strict=True)
        ]
        await served.until(lambda counts: counts["kv_tokens"]["offline"] > 300)
        others = [asyncio.create_task(online(number)) for number in range(4)]
        await served.until(lambda counts: counts["offline"]["waiting"] > 0)
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)
        await asyncio.gather(*others)

    served.do(begin_and_cancel())
    assert min(map(len, heard)) > 10
    served.assert_nothing_left()


def test_an_abort_before_the_engine_has_the_line_is_no_fault_of_the_line(served: Served) -> None:
    """Since 0.5.22 SGLang forgets it: the scheduler has no such request, and serves it later."""
    from sglang_coserve.srt import compat

    async def abort_while_paused() -> LineResult:
        manager = served.manager
        manager.is_pause = True
        line = asyncio.create_task(served.run(COMPLETIONS, COMPLETION))
        while not manager.rid_to_state:
            await asyncio.sleep(0)
        for rid in list(manager.rid_to_state):
            manager.abort_request(rid)
        async with manager.is_pause_cond:
            manager.is_pause = False
            manager.is_pause_cond.notify_all()
        return await line

    result = served.do(abort_while_paused())
    expected = (503, True) if compat.aborted_errors() else (200, False)
    assert (result.status_code, result.is_retryable) == expected
    served.assert_nothing_left()


def test_a_line_that_the_engine_does_not_have_yet_is_cancelled_not_handed_back(
    served: Served,
) -> None:
    """It would not be known there, and an abort would be lost, as above."""

    def let_leave(_line: object) -> None:
        raise AssertionError("the engine does not have it yet")

    backend = BatchBackend(
        served.manager, served.engine.template_manager, fingerprint="small", let_leave=let_leave
    )
    line = LineRequest("batch_1", 1, COMPLETIONS, dict(LONG))

    async def take_out_while_paused() -> None:
        manager = served.manager
        manager.is_pause = True
        running = asyncio.create_task(backend.run(line, lambda _: None))
        while not manager.rid_to_state:
            await asyncio.sleep(0)
        assert not backend.hand_back(line)
        for _ in range(2):
            await served.counts()  # The schedulers have answered what they were asked before.
        async with manager.is_pause_cond:
            manager.is_pause = False
            manager.is_pause_cond.notify_all()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    served.do(take_out_while_paused())
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
    ("endpoint", "body"),
    [
        (COMPLETIONS, LONG),
        (COMPLETIONS, {**LONG, "n": 2}),
        (CHAT, {**GREEDY, "messages": MESSAGES, "max_tokens": 900}),
        (RESPONSES, {**GREEDY, "input": "hello", "max_output_tokens": 900}),
    ],
    ids=["completion", "choices", "chat", "responses"],
)
def test_lines_that_a_pause_aborts_are_tried_again_without_a_trace_in_the_log(
    served: Served, endpoint: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Those that run, and those that wait: of these SGLang says less."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    async def pause_and_go_on() -> list[LineResult]:
        lines = [asyncio.create_task(served.run(endpoint, body)) for _ in range(8)]
        await served.until(lambda counts: counts["offline"]["waiting"] > 0)
        await served.until(lambda counts: counts["offline"]["running"] > 0)
        await served.manager.pause_generation(PauseGenerationReqInput(mode="abort"))
        assert served.backend.is_changing
        results = await asyncio.gather(*lines)
        await served.manager.continue_generation(ContinueGenerationReqInput())
        assert not served.backend.is_changing
        return results

    for result in served.do(pause_and_go_on()):
        assert (result.status_code, result.is_retryable) == (503, True), result
        assert result.request_id
        assert result.body["error"]["message"]
        assert "KeyError" not in str(result.body)
    assert [record for record in caplog.records if record.exc_info] == []
    served.assert_nothing_left()
