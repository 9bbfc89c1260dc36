"""One server under load for the tests of the package."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from srt.batch_server.deployment import API_KEY, Deployment


@pytest.fixture(scope="package")
def deployment(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Closed but for its figures."""
    flags = ("--startup-profile-seconds", "0", "--slo-ttft-ms", "400", "--open-view")
    directory = tmp_path_factory.mktemp("server")
    with Deployment(small_model, directory, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, where it is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with deployment.client() as client:
        yield client


@pytest.fixture
def online_load(deployment: Deployment) -> Iterator[None]:
    """One online request after the other."""
    has_ended = threading.Event()

    def load() -> None:
        headers = {"authorization": f"Bearer {API_KEY}"}
        body = {"text": "Who?", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        with httpx2.Client(base_url=deployment.base_url, headers=headers, timeout=60) as http:
            while not has_ended.is_set():
                http.post("/generate", json=body).raise_for_status()
                has_ended.wait(0.05)

    thread = threading.Thread(target=load)
    thread.start()
    yield
    has_ended.set()
    thread.join(60)
