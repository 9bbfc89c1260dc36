"""Gateways as processes, and engines in a thread."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from anyio.from_thread import start_blocking_portal

from batch.scripted_backend import ScriptedBackend
from calls import get
from http_lines.live_engine import ADMIN_KEY, LiveEngine
from sglang_coserve.local_server import LocalServer
from waiting import GIVE_UP_S

TEST = Path(__file__).parents[1]


class EngineThread:
    """An engine on a loop of its own."""

    def __init__(self, *, holds: bool = False, port: int = 0) -> None:
        self.backend = ScriptedBackend(holds=holds)
        self._engine = LiveEngine(self.backend, port=port)
        self.url, self.port = self._engine.url, self._engine.port

    def __enter__(self) -> Self:
        self._ending = ExitStack()
        self._portal = self._ending.enter_context(start_blocking_portal())
        engine = self._portal.wrap_async_context_manager(self._engine)
        self._ending.enter_context(engine)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.close()

    def generate_all(self, count: int) -> None:
        """Generate ``count`` more tokens of each line that the engine has."""
        for held in self.backend.in_flight:
            self._portal.call(held.generate, count)

    def finish_all(self) -> None:
        """Answer what the engine has."""
        self._portal.call(self.backend.finish_all)


def gateway(
    directory: Path, *flags: str, port: int | None = None, name: str = "gateway"
) -> LocalServer:
    """A gateway on ``directory``, which cannot import SGLang."""
    return LocalServer(
        ["--coserve-data-dir", str(directory / "data"), *flags],
        log_path=directory / f"{name}.log",
        module="fleet.without_sglang",
        port=port,
        ready_timeout_s=GIVE_UP_S,
        extra_env={
            "COSERVE_ENGINE_ADMIN_KEY": ADMIN_KEY,
            "PYTHONPATH": os.pathsep.join([str(TEST), os.environ.get("PYTHONPATH", "")]),
        },
    )


def fleet_of(server: LocalServer, key: str | None = None) -> dict[str, Any]:
    return get(server, "/coserve/status", key).raise_for_status().json()["fleet"]
