"""What takes long happens beside the event loop, and is the same there."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from srt.batch_backend.served import CHAT, COMPLETIONS, GREEDY, RESPONSES, Served

LONG_TEXT = "The ferry left the harbour before the rain. " * 5000


class Watched:
    """SGLang's tokenizer, with a note of the threads that use it for much."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, texts: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(texts)
        return self.inner(texts, *args, **kwargs)

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(text)
        return self.inner.encode(text, *args, **kwargs)

    def _note(self, texts: Any) -> None:
        if sum(map(len, [texts] if isinstance(texts, str) else texts)) > 1000:
            self.threads.add(threading.current_thread().name)


@pytest.fixture
def watched(served: Served, monkeypatch: pytest.MonkeyPatch) -> Watched:
    tokenizer = Watched(served.manager.tokenizer)
    monkeypatch.setattr(served.manager, "tokenizer", tokenizer)
    return tokenizer


BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": LONG_TEXT},
    CHAT: {"messages": [{"role": "user", "content": LONG_TEXT}]},
    RESPONSES: {"input": LONG_TEXT},
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_text_that_is_too_long_is_refused_from_its_beginning(
    served: Served, watched: Watched, endpoint: str
) -> None:
    result, _ = served.serve(endpoint, {**GREEDY, **BODIES[endpoint]})
    assert (result.status_code, result.is_retryable) == (400, False)
    assert "longer than the" in result.body["error"]["message"]
    # Nothing but a beginning was tokenized.
    assert watched.threads == set()
    served.assert_nothing_left()


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_text_is_not_tokenized_on_the_event_loop(
    served: Served, watched: Watched, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr("sglang_coserve.srt.threaded_manager._LARGE_CHARS", 500)
    text = LONG_TEXT[:1200]
    body = {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}
    result, _ = served.serve(endpoint, {**GREEDY, **body[endpoint], "max_tokens": 4})
    assert result.status_code == 200, result.body
    assert watched.threads
    assert all(name.startswith("coserve-") for name in watched.threads)


def test_many_prompts_let_others_have_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [f"prompt {n}" for n in range(40)], "max_tokens": 1}
    turns: list[int] = []
    stock = type(served.manager).__mro__[2]._tokenize_one_request
    num_tokenized = 0

    async def counted(self: Any, obj: Any) -> Any:
        nonlocal num_tokenized
        num_tokenized += 1
        return await stock(self, obj)

    monkeypatch.setattr(type(served.manager).__mro__[2], "_tokenize_one_request", counted)

    async def watch() -> None:
        while True:
            turns.append(num_tokenized)
            await asyncio.sleep(0)

    async def both() -> Any:
        watching = asyncio.create_task(watch())
        try:
            return await served.run(COMPLETIONS, {"model": "small", **body})
        finally:
            watching.cancel()

    result = served.do(both())
    assert result.status_code == 200, result.body
    assert max(b - a for a, b in itertools.pairwise(turns)) <= 8


def test_too_many_prompts_are_the_fault_of_their_line(served: Served) -> None:
    result, _ = served.serve(COMPLETIONS, {**GREEDY, "prompt": ["a"] * 3000})
    assert (result.status_code, result.is_retryable) == (400, False)
    assert "3,000 prompts" in result.body["error"]["message"]
    served.assert_nothing_left()
