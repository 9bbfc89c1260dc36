"""A real server under the load of both classes, and what a client measured of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from batch.route_calls import until
from calls import exported, get
from sglang_coserve.batch.job_supervisor import COUNT_INTERVAL_S
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, Deployment, create, lines
from waiting import eventually

ONLINE_REQUESTS = 24
ONLINE_TOKENS = 12
LINES = 64
LINE_TOKENS = 240

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Measured:
    """An online request, as its client saw it; seconds."""

    ttft_s: float
    gaps_s: list[float]


class Watched:
    """The server with its load behind it; idle."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.base_url = deployment.base_url
        self.online: list[Measured] = []
        self.batch_id = ""
        self.batch: dict[str, Any] = {}
        self.samples_under_load: Samples = {}
        self.samples_afterwards: Samples = {}
        self.status_afterwards: dict[str, Any] = {}
        self.trace: list[dict[str, Any]] = []
        """``/coserve/trace`` of the load."""
        self.traced: Measured
        """The last request of the load, with the ``x-request-id`` ``trip/1``."""

    def status(self) -> dict[str, Any]:
        (replica,) = self.deployment.status()["replicas"]
        return replica

    def get(self, path: str, key: str | None = API_KEY) -> httpx2.Response:
        return get(self.deployment, path, key)

    def samples(self) -> Samples:
        """What ``/metrics`` says of us now, without the label of the model."""
        return {
            (one.name, frozenset(set(one.labels.items()) - {("model_name", "small")})): one.value
            for one in exported(self.deployment)
        }

    def _samples_with_a_batch(self) -> Samples | None:
        found = self.samples()
        is_counted = found.get(("coserve_batches", frozenset({("state", "in_progress")})))
        is_forecast = found.get(("coserve_batch_required_tokens_per_second", frozenset()))
        return found if is_counted and is_forecast else None

    def load(self) -> None:
        """Serve a batch and, beside it, online requests one after the other."""
        with self.deployment.client() as client:
            self.batch_id = create(client, lines(LINES, LINE_TOKENS)).id
            until(client, self.batch_id, "in_progress")
            eventually(lambda: self.status()["offline"]["running"] > 0)
            with ThreadPoolExecutor(2) as threads:
                answers = threads.map(self._stream, range(ONLINE_REQUESTS))
                self.samples_under_load = eventually(self._samples_with_a_batch)
                self.online = list(answers)
            self.traced = self._stream(ONLINE_REQUESTS, "trip/1")
            until(client, self.batch_id, "completed")
            # Counted now and then, and exported once a second.
            eventually(lambda: self.status()["online"]["running"] == 0)
            time.sleep(2 * COUNT_INTERVAL_S)
            self.batch = client.batches.retrieve(self.batch_id).to_dict()
        self.samples_afterwards, self.status_afterwards = self.samples(), self.status()
        answer = self.get("/coserve/trace?seconds=600", ADMIN_KEY).raise_for_status()
        assert answer.headers["content-type"] == "application/json"
        self.trace = answer.json()

    def suspend_a_step(self) -> None:
        """Send online requests beside a long batch until one has suspended a step."""
        with self.deployment.client() as client:
            batch_id = create(client, lines(4 * LINES, LINE_TOKENS)).id
            eventually(lambda: self.status()["offline"]["running"] > 0)

            def has_suspended() -> bool:
                self._stream(0)
                return sum(self.status()["safepoints"]["suspended"].values()) > 0

            eventually(has_suspended)
            client.batches.cancel(batch_id)
            until(client, batch_id, "cancelled")

    def _stream(self, number: int, request_id: str | None = None) -> Measured:
        body = {
            "text": f"{number} boats on the river",
            "sampling_params": {"max_new_tokens": ONLINE_TOKENS, "ignore_eos": True},
            "stream": True,
        }
        sent_s = time.perf_counter()
        request_id = request_id or f"online-{number}"
        headers = {"authorization": f"Bearer {API_KEY}", "x-request-id": request_id}
        with httpx2.stream(
            "POST", f"{self.base_url}/generate", json=body, headers=headers, timeout=60
        ) as response:
            times_s = [
                time.perf_counter()
                for event in httpx2.EventSource(response)
                if event.data != "[DONE]"
            ]
        gaps_s = [after - before for before, after in pairwise(times_s)]
        return Measured(times_s[0] - sent_s, gaps_s)


@contextmanager
def served(
    model: Path, directory: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Watched]:
    """Start a server that plans and exports, let it serve the load, and end it."""
    deployment = Deployment(
        model,
        directory,
        *("--enable-metrics", "--enable-cache-report", "--startup-profile-seconds", "2"),
        *flags,
    )
    deployment.environment |= environment or {}
    with deployment:
        watched = Watched(deployment)
        watched.load()
        yield watched
