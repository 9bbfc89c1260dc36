"""The Batch API inside SGLang's server: opened with its event loop, closed with it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI

from sglang_coserve.batch import BatchLimits, BatchService, StorageError
from sglang_coserve.batch.routes import (
    BatchApiOffError,
    add_batch_routes,
    find_service,
    operator_endpoints,
    set_admin_key,
    set_service,
)
from sglang_coserve.batch.webhooks import Webhooks, WebhookTarget
from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import compat

__all__ = [
    "batch_api_status",
    "check_batch_settings",
    "install_batch_api",
    "open_routes_warning",
]

SECRET_VARIABLE: Final = "COSERVE_WEBHOOK_SECRET"
_POLL_S: Final = 0.2

logger = logging.getLogger(__name__)


def check_batch_settings(config: CoserveConfig) -> None:
    """Check, before the model is loaded, that the Batch API will be able to start.

    Raises:
        StartupError: the data directory cannot be used.
        ConfigError: the webhook's address or secret cannot be used.
    """
    _webhook_target(config)
    if config.coserve_data_dir is not None:
        asyncio.run(BatchService.check(Path(config.coserve_data_dir)))


def install_batch_api(http_server: Any, admin_api_key: str | None) -> None:
    """Add the Batch API's routes to SGLang's app, and run its service while the server runs."""
    app: FastAPI = http_server.app
    add_batch_routes(app)
    if admin_api_key:
        from sglang.srt.utils.auth import AuthLevel, auth_level

        set_admin_key(app, admin_api_key)
        # Otherwise SGLang would require --api-key for these routes. Without an admin key the
        # routes refuse by themselves, and SGLang need not check every request.
        for endpoint in operator_endpoints():
            auth_level(AuthLevel.ADMIN_FORCE)(endpoint)
    stock_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
        async with AsyncExitStack() as stack:
            # The service starts first, so that its errors stop the start before the warm-up.
            config: CoserveConfig = app.server_args._coserve  # type: ignore[attr-defined]
            if config.coserve_data_dir is not None:
                await stack.enter_async_context(_served(http_server, config))
            yield await stack.enter_async_context(stock_lifespan(app))

    app.router.lifespan_context = lifespan


async def batch_api_status(app: FastAPI) -> dict[str, Any] | None:
    """Return the ``ServiceStatus`` in plain values; None while the Batch API is off.

    If the disk has failed, only an ``error`` is returned, so that the rest of the server's
    status can still be shown.
    """
    try:
        return asdict(await find_service(app).status())
    except BatchApiOffError:
        return None
    except StorageError as error:
        return {"error": str(error)}


def open_routes_warning(api_key: str | None, admin_api_key: str | None) -> str | None:
    """Return a warning if the keys that are set leave routes open; None otherwise."""
    if api_key or not admin_api_key:
        return None
    return (
        "--admin-api-key without --api-key: only SGLang's management routes and /coserve/batches "
        "need a key; requests, /v1/files, /v1/batches and /coserve/status are open to everybody "
        "who reaches the port, and each key that a client sends is taken, unchecked, for an owner: "
        "add --api-key, or let a gateway check keys"
    )


@asynccontextmanager
async def _served(http_server: Any, config: CoserveConfig) -> AsyncGenerator[None]:
    from sglang_coserve.srt.batch_backend import BatchBackend
    from sglang_coserve.srt.engine_death import fatal_signals_told_to
    from sglang_coserve.srt.loaded_model import loaded_fingerprint
    from sglang_coserve.srt.replicas import EXPECTED_RATE_KEY, STATE_KEY

    assert config.coserve_data_dir is not None
    state = http_server._global_state
    manager = state.tokenizer_manager
    # In a thread: it reads parts of all weights.
    loaded = await asyncio.to_thread(loaded_fingerprint, compat.settings_of(manager.server_args))
    logger.info("the model's fingerprint is %s", loaded)
    backend = BatchBackend(
        manager,
        state.template_manager,
        fingerprint=loaded,
        expected_tokens_per_s=state.scheduler_info[STATE_KEY][EXPECTED_RATE_KEY],
    )
    target = _webhook_target(config)
    service = await BatchService.open(
        Path(config.coserve_data_dir), backend, _limits(config), record_events=target is not None
    )
    set_service(http_server.app, service)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, http_server.app, service)
        stack.enter_context(fatal_signals_told_to(service.fatal_signal_path))
        manager.coserve_on_death = service.note_engine_death
        if target is not None:
            await stack.enter_async_context(Webhooks(service, target))
        stopping = asyncio.create_task(_close_when_stopping(backend, stack))
        try:
            yield
        finally:
            if not backend.is_stopping:
                stopping.cancel()
            await asyncio.wait({stopping})


async def _close_when_stopping(backend: Any, stack: AsyncExitStack) -> None:
    """Close the service when the server is told to stop.

    SGLang waits for all requests, including lines in flight, before it shuts its app down.
    """
    while not backend.is_stopping:
        await asyncio.sleep(_POLL_S)
    logger.info("batches stop where they are; the next start continues them")
    await stack.aclose()


async def _close(app: FastAPI, service: BatchService) -> None:
    set_service(app, None, "the server is stopping: its batches continue when it starts again")
    await service.close()


def _limits(config: CoserveConfig) -> BatchLimits:
    stored_gib = config.batch_max_stored_gib_per_key
    return BatchLimits(
        max_upload_bytes=config.batch_max_upload_mib << 20,
        max_lines=config.batch_max_lines,
        max_in_flight=config.batch_max_in_flight,
        max_active_batches=config.batch_max_active,
        max_active_batches_per_owner=config.batch_max_active_per_key,
        max_stored_bytes_per_owner=None if stored_gib is None else int(stored_gib * (1 << 30)),
    )


def _webhook_target(config: CoserveConfig) -> WebhookTarget | None:
    if config.batch_webhook_url is None:
        return None
    return WebhookTarget(
        config.batch_webhook_url,
        os.environ.get(SECRET_VARIABLE, ""),
        allow_private=config.batch_webhook_allow_private,
    )
