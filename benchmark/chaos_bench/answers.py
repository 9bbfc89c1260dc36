"""Greedy requests whose answers are known from an undisturbed server."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx2
import orjson

from chaos_bench.figures import ChaosError
from chaos_bench.vision_model import random_picture

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

ADAPTER: Final = "dialect"

_WORDS: Final = ("mill", "river", "lamp", "boat", "rain", "harbour", "letter", "winter", "road")
_PROMPT_WORDS: Final = (4, 200)
_OUTPUT_TOKENS: Final = (8, 160)
_LEAST_MARGIN: Final = 1e-4
"""Between the log-probabilities of the first two candidates for a token. Of 60 prompts one had a
margin of 1e-6; in larger batches its sums were rounded otherwise, and the other token came."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What a prompt is answered with, whatever happens around it."""

    prompt: str
    max_tokens: int
    text: str
    picture: str | None = None
    """A ``data:`` URL; the request is a chat then, and a completion otherwise."""

    model: str = "default"
    """Name of the model, with an adapter behind a colon."""

    @property
    def path(self) -> str:
        """Where it is asked."""
        return COMPLETIONS if self.picture is None else CHAT

    def body(self, **extra: Any) -> dict[str, Any]:
        """Return what asks for it."""
        body = completion_body(self.prompt, self.max_tokens, model=self.model, **extra)
        if self.picture is not None:
            text = {"type": "text", "text": body.pop("prompt")}
            picture = {"type": "image_url", "image_url": {"url": self.picture}}
            body["messages"] = [{"role": "user", "content": [picture, text]}]
        return body


def completion_body(prompt: str, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """Return the body of a greedy completion that does not end early."""
    fields = {"model": "default", "temperature": 0, "ignore_eos": True}
    return {**fields, "prompt": prompt, "max_tokens": max_tokens, **extra}


def answered_text(choice: dict[str, Any]) -> str:
    """Return the text of a choice, or of a part of it in a stream."""
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or ""


def known_answers(
    base_url: str, count: int, seed: int, picture_share: float = 0.0, adapter_share: float = 0.0
) -> list[KnownAnswer]:
    """Ask a server that nothing else is asked of; answers that rounding may change are left out.

    ``picture_share`` of the requests have a picture, which the model must take, and
    ``adapter_share`` ask for the adapter ``ADAPTER``, which the server must have.

    Raises:
        ChaosError: it does not answer.
    """
    rng = random.Random(seed)
    known: list[KnownAnswer] = []
    with httpx2.Client(base_url=base_url, timeout=60.0, trust_env=False) as client:
        while len(known) < count:
            # The first words differ, so that not every prompt shares a prefix with the next.
            words = rng.choices(_WORDS, k=rng.randint(*_PROMPT_WORDS))
            asked = KnownAnswer(" ".join(words), rng.randint(*_OUTPUT_TOKENS), "")
            if rng.random() < picture_share:
                asked = replace(asked, picture=random_picture(rng))
            if rng.random() < adapter_share:
                asked = replace(asked, model=f"default:{ADAPTER}")
            is_chat = asked.path == CHAT
            logprobs = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
            try:
                response = client.post(asked.path, json=asked.body(**logprobs))
                choice = orjson.loads(response.raise_for_status().content)["choices"][0]
            except httpx2.HTTPError as error:
                raise ChaosError(f"the undisturbed server does not answer: {error}") from error
            if _margin(choice["logprobs"]) >= _LEAST_MARGIN:
                known.append(replace(asked, text=answered_text(choice)))
    if len({answer.text for answer in known}) < count // 2:
        raise ChaosError("the model's answers do not vary: they would hide mistakes")
    time.sleep(0.5)  # What the engine still does for the last of them.
    return known


def _margin(logprobs: dict[str, Any]) -> float:
    """Return the least distance between the best two candidates for a token."""
    if "content" in logprobs:
        tokens = [[each["logprob"] for each in t["top_logprobs"]] for t in logprobs["content"]]
    else:
        tokens = [list(candidates.values()) for candidates in logprobs["top_logprobs"]]
    pairs = [sorted(candidates) for candidates in tokens]
    # Two candidates of a completion that are written alike have one entry.
    return min(pair[-1] - pair[-2] if len(pair) > 1 else 0.0 for pair in pairs)
