"""One server for the tests of the package, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from srt.batch_server.deployment import Deployment
from web_server import WebServer, web_server


@pytest.fixture(scope="package")
def webhook_receiver() -> Iterator[WebServer]:
    with web_server(lambda call: call.answer(204)) as receiver:
        yield receiver


@pytest.fixture(scope="package")
def deployment(
    small_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    webhook_receiver: WebServer,
) -> Iterator[Deployment]:
    with Deployment(
        small_model,
        tmp_path_factory.mktemp("server"),
        *("--offline-max-running", "4", "--startup-profile-seconds", "0"),
        "--enable-metrics",
        *("--batch-webhook-url", f"{webhook_receiver.url}/hook"),
    ) as deployment:
        yield deployment


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with deployment.client() as client:
        yield client
