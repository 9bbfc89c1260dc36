"""Questions to the schedulers, and whose answer is whose."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator

from sglang_coserve.srt.monitoring.scheduler_query import ANSWER_KEY, PULSE, STANDING, ask


async def test_a_question_that_is_given_up_leaves_its_answer_to_no_other() -> None:
    """A drain cancels tasks that ask, and the engine may then be let in again."""
    sent: list[Any] = []
    communicator = FanOutCommunicator(sent.append, 1)
    manager = SimpleNamespace(
        auto_create_handle_loop=lambda: None, get_internal_state_communicator=communicator
    )

    def answer(text: str) -> None:
        communicator.handle_recv(SimpleNamespace(internal_state={ANSWER_KEY: text}))

    given_up = asyncio.create_task(ask(manager, PULSE))
    await asyncio.sleep(0.01)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    asked = asyncio.create_task(ask(manager, STANDING))
    await asyncio.sleep(0.01)
    answer("runs")
    await asyncio.sleep(0.01)
    answer("stands")
    assert await asyncio.wait_for(asked, 1) == ["stands"]
    assert len(sent) == 2
