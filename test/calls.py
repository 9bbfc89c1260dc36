"""Calls of a server, with any key."""

from __future__ import annotations

from typing import Any, Protocol

import httpx
import openai

from waiting import GIVE_UP_S


class Server(Protocol):
    base_url: str


def call(
    server: Server, method: str, path: str, key: str | None = None, **options: Any
) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = f"{server.base_url}{path}"
    return httpx.request(method, url, headers=headers, timeout=GIVE_UP_S, **options)


def get(server: Server, path: str, key: str | None = None) -> httpx.Response:
    return call(server, "GET", path, key)


def client_of(server: Server, api_key: str = "key") -> openai.OpenAI:
    """OpenAI's client, which tells of every failure at once."""
    url = f"{server.base_url}/v1"
    return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=GIVE_UP_S)
