"""Handlers whose steps run in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sglang_coserve.srt.batch_backend.endpoints import HandlerThread, OnLoop


async def thread_name() -> str:
    return threading.current_thread().name


async def handler(fails: bool) -> tuple[str, str, str]:
    """As SGLang's since 0.5.22: it converts beside the event loop, then generates on it."""
    before = threading.current_thread().name
    loop = asyncio.get_running_loop()
    converted = await loop.run_in_executor(None, lambda: threading.current_thread().name)
    generated = await OnLoop(thread_name)
    if fails:
        raise ValueError("bad")
    return before, converted, generated


def test_conversion_stays_in_the_thread_and_generation_comes_to_the_loop() -> None:
    before, converted, generated = asyncio.run(HandlerThread("lines").run(handler(fails=False)))
    assert before == converted != generated
    assert generated == threading.current_thread().name


def test_an_error_of_a_handler_is_that_of_the_call() -> None:
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(HandlerThread("lines").run(handler(fails=True)))
