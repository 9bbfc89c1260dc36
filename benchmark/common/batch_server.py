"""A server with a Batch API, and calls to it with OpenAI's client. No call waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import httpx
import openai
from openai.types import Batch

from common.failures import RunFailedError
from common.input_file import COMPLETIONS
from sglang_coserve.local_server import LocalServer, free_port

__all__ = ["BatchServer", "openai_client", "upload", "wait_until"]

_CALL_TIMEOUT_S: Final = 600.0
_CANCEL_TIMEOUT_S: Final = 120.0
_FINAL: Final = frozenset({"completed", "failed", "expired", "cancelled"})


def wait_until(is_true: Callable[[], bool], timeout_s: float, what: str, poll_s: float) -> None:
    """Return when ``is_true``.

    Raises:
        RunFailedError: it was not within ``timeout_s``.
    """
    give_up_s = time.perf_counter() + timeout_s
    while not is_true():
        if time.perf_counter() > give_up_s:
            raise RunFailedError(f"waited for {what} for {timeout_s:.0f} s in vain")
        time.sleep(poll_s)


def upload(client: openai.OpenAI, path: Path) -> str:
    """Upload a file; return its id."""
    with path.open("rb") as file:
        return client.files.create(file=(path.name, file), purpose="batch").id


def openai_client(base_url: str) -> openai.OpenAI:
    """Return OpenAI's client, which asks once and not by way of a proxy."""
    return openai.OpenAI(
        base_url=f"{base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=_CALL_TIMEOUT_S,
        http_client=httpx.Client(trust_env=False, timeout=_CALL_TIMEOUT_S),
    )


class BatchServer:
    """Runs while it is entered; may be killed and started again on the same directory."""

    def __init__(
        self,
        flags: Sequence[str],
        data: Path,
        log: Path,
        ready_timeout_s: float,
        **process: Any,
    ) -> None:
        """``process`` are other settings of ``LocalServer``: a gateway's module, say."""
        self.data = data
        self._server = LocalServer(
            [*flags, "--coserve-data-dir", str(data)],
            log_path=log,
            port=free_port(),
            ready_timeout_s=ready_timeout_s,
            **process,
        )
        self.base_url = self._server.base_url
        self.client = openai_client(self.base_url)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self._server.stop()

    @property
    def pid(self) -> int:
        """Of the process with the HTTP server and the Batch API."""
        return self._server.pid

    def upload(self, path: Path) -> str:
        """Upload a file; return its id."""
        return upload(self.client, path)

    def create(self, file_id: str) -> str:
        """Begin a batch with time enough; return its id."""
        # The type knows OpenAI's one window only.
        window: Any = "30d"
        return self.client.batches.create(
            input_file_id=file_id, endpoint=COMPLETIONS, completion_window=window
        ).id

    def create_paused(self, file_id: str) -> str:
        """Begin a batch that is checked and not served; return its id."""
        batch_id = self.create(file_id)
        self.client.post(f"/batches/{batch_id}/pause", cast_to=httpx.Response)
        return batch_id

    def until(self, batch_id: str, *statuses: str, timeout_s: float, poll_s: float = 0.05) -> Batch:
        """Wait until a batch is in one of ``statuses``.

        Raises:
            RunFailedError: it ended otherwise, or not in time.
        """
        found: list[Batch] = []

        def is_there() -> bool:
            batch = self.client.batches.retrieve(batch_id)
            found[:] = [batch]
            if batch.status in _FINAL.difference(statuses):
                raise RunFailedError(f"batch {batch_id} is {batch.status}: {batch.errors}")
            return batch.status in statuses

        wait_until(is_there, timeout_s, f"batch {batch_id} to be {statuses[0]}", poll_s)
        return found[0]

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch and wait until nothing of it is in the engine; its outputs are deleted."""
        self.client.batches.cancel(batch_id)
        batch = self.until(batch_id, "cancelled", timeout_s=_CANCEL_TIMEOUT_S)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                self.client.files.delete(file_id)

    def offline_received(self) -> int:
        """Return how many offline requests the engine has had so far."""
        answer = httpx.get(f"{self.base_url}/coserve/status", timeout=30.0, trust_env=False)
        (replica,) = answer.raise_for_status().json()["replicas"]
        return int(replica["offline"]["received"])
