"""Seeds on every entry point."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from batch.route_calls import completed, texts
from srt.batch_server.deployment import CHAT, create, line

PROMPT = "Seventeen rivers run"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
FREE = {"ignore_eos": True}


def of_chat(client: openai.OpenAI, seed: int | None) -> str:
    answer = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": PROMPT}],
        seed=seed,
        extra_body=FREE,
        **SAMPLED,
    )
    return answer.choices[0].message.content or ""


def of_completions(client: openai.OpenAI, seed: int | None) -> str:
    answer = client.completions.create(
        model="small", prompt=PROMPT, seed=seed, extra_body=FREE, **SAMPLED
    )
    return answer.choices[0].text


def of_generate(client: openai.OpenAI, seed: int | None) -> str:
    params = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": seed, **FREE}
    address = str(client.base_url).removesuffix("/v1/")
    body = {"text": PROMPT, "sampling_params": params}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    answer = httpx2.post(f"{address}/generate", json=body, headers=headers, timeout=60.0)
    return str(answer.raise_for_status().json()["text"])


@pytest.mark.parametrize("ask", [of_chat, of_completions, of_generate])
def test_a_seed_gives_the_same_answer_again(
    client: openai.OpenAI, ask: Callable[[openai.OpenAI, int | None], str]
) -> None:
    alone = [ask(client, seed) for seed in (1, 2)]
    with ThreadPoolExecutor(8) as pool:
        crowd = [*pool.map(lambda seed: ask(client, seed), [1, None, 2, None, 1, 2, None, 3])]
    assert [crowd[0], crowd[2], crowd[4], crowd[5]] == [*alone, *alone]
    assert len({*alone, crowd[1], crowd[3], crowd[6], crowd[7]}) == 6


def test_choices_have_the_seeds_that_follow(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt=PROMPT, seed=5, n=3, extra_body=FREE, **SAMPLED
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == [of_completions(client, seed) for seed in (5, 6, 7)]
    assert len({*texts}) == 3


def test_seeds_of_lines(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    content = "".join(
        line(f"id-{number}", url=CHAT, messages=messages, seed=number % 2, **SAMPLED)
        for number in range(6)
    ).encode()
    served = completed(client, create(client, content, endpoint=CHAT).id)
    expected = [of_chat(client, seed) for seed in (0, 1)]
    assert [texts(served)[f"id-{number}"] for number in range(6)] == expected * 3
