"""What takes long happens beside the event loop, and is the same there."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from srt.batch_backend.served import CHAT, COMPLETIONS, EMBEDDINGS, GREEDY, LONG_TEXT, Served


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


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_text_is_not_tokenized_on_the_event_loop(
    served: Served, watched: Watched, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr("sglang_coserve.guard.tokenizer_manager.LARGE_CHARS", 500)
    text = LONG_TEXT[:1200]
    body = {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}
    result, _ = served.serve(endpoint, {**GREEDY, **body[endpoint], "max_tokens": 4})
    assert result.status_code == 200, result.body
    assert watched.threads
    assert "MainThread" not in watched.threads, "where the event loop runs"


@pytest.mark.parametrize("endpoint", [COMPLETIONS, EMBEDDINGS])
def test_many_large_prompts_are_tokenized_before_any_is_answered(
    start: Any, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """An answer to the first that came before the last was tokenized would have been lost."""
    served = start(is_embedding=endpoint == EMBEDDINGS)
    watched = Watched(served.manager.tokenizer)
    monkeypatch.setattr(served.manager, "tokenizer", watched)
    monkeypatch.setattr("sglang_coserve.guard.tokenizer_manager.LARGE_CHARS", 500)
    texts = [f"prompt {n} of {'many ' * 10}" for n in range(40)]
    name = "prompt" if endpoint == COMPLETIONS else "input"
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0} if name == "prompt" else {}
    body = {"model": "small", name: texts, **options}
    for _ in range(5):
        together = served.answer(endpoint, body)
    assert watched.threads
    assert "MainThread" not in watched.threads, "where the event loop runs"
    alone = served.answer(endpoint, {**body, name: texts[7]})
    found = "choices" if name == "prompt" else "data"
    # As numbers, embeddings differ in the last digits with what is computed beside them.
    if name == "prompt":
        assert together[found][7]["text"] == alone[found][0]["text"]
    assert len(together[found]) == 40
