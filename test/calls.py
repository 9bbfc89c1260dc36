"""Calls of a server, with any key."""

from __future__ import annotations

from typing import Any, Protocol

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from waiting import GIVE_UP_S


class Server(Protocol):
    base_url: str


def call(
    server: Server, method: str, path: str, key: str | None = None, **options: Any
) -> httpx2.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = f"{server.base_url}{path}"
    return httpx2.request(method, url, headers=headers, timeout=GIVE_UP_S, **options)


def get(server: Server, path: str, key: str | None = None) -> httpx2.Response:
    return call(server, "GET", path, key)


def exported(server: Server, prefix: str = "coserve_") -> list[Sample]:
    """What ``/metrics`` says of the families whose names begin so."""
    families = text_string_to_metric_families(get(server, "/metrics").raise_for_status().text)
    return [one for each in families if each.name.startswith(prefix) for one in each.samples]


def client_of(server: Server, api_key: str = "key") -> openai.OpenAI:
    """OpenAI's client, which tells of every failure at once."""
    url = f"{server.base_url}/v1"
    return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=GIVE_UP_S)
