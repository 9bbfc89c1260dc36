"""Clients of the routes: of the ``app`` that a file of tests has, with one key."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest

from batch.live_app import LiveApp


@pytest.fixture
def key() -> str:
    return "key"


@pytest.fixture
def client(app: LiveApp, key: str) -> Iterator[openai.OpenAI]:
    with app.client(key) as client:
        yield client


@pytest.fixture
def http(app: LiveApp, key: str) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=app.base_url, headers=headers, timeout=30) as http:
        yield http
