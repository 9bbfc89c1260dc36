"""Greedy completions whose answers are known from an undisturbed server."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

import httpx
import orjson

from chaos_bench.observation import ChaosError
from common.input_file import COMPLETIONS, completion_body

__all__ = ["KnownAnswer", "known_answers"]

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


def known_answers(base_url: str, count: int, seed: int) -> list[KnownAnswer]:
    """Ask a server that nothing else is asked of; answers that rounding may change are left out.

    Raises:
        ChaosError: it does not answer.
    """
    rng = random.Random(seed)
    known: list[KnownAnswer] = []
    with httpx.Client(base_url=base_url, timeout=60.0, trust_env=False) as client:
        while len(known) < count:
            # The first words differ, so that not every prompt shares a prefix with the next.
            words = rng.choices(_WORDS, k=rng.randint(*_PROMPT_WORDS))
            prompt, max_tokens = " ".join(words), rng.randint(*_OUTPUT_TOKENS)
            body = completion_body(prompt, max_tokens, logprobs=2)
            try:
                response = client.post(COMPLETIONS, json=body)
                choice = orjson.loads(response.raise_for_status().content)["choices"][0]
            except httpx.HTTPError as error:
                raise ChaosError(f"the undisturbed server does not answer: {error}") from error
            if _margin(choice["logprobs"]["top_logprobs"]) >= _LEAST_MARGIN:
                known.append(KnownAnswer(prompt, max_tokens, choice["text"]))
    if len({answer.text for answer in known}) < count // 2:
        raise ChaosError("the model's answers do not vary: they would hide mistakes")
    time.sleep(0.5)  # What the engine still does for the last of them.
    return known


def _margin(top_logprobs: list[dict[str, float]]) -> float:
    """Return the least distance between the best two candidates for a token."""
    pairs = [sorted(candidates.values()) for candidates in top_logprobs]
    # Two candidates that are written alike have one entry.
    return min(pair[-1] - pair[-2] if len(pair) > 1 else 0.0 for pair in pairs)
