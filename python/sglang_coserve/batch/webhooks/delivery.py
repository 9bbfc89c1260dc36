"""Delivers the ends of batches to a web address, until it accepts them.

Requests are signed as the Standard Webhooks specification says and OpenAI's clients check
(``client.webhooks.unwrap``): HMAC-SHA256 over id, time and body. Undelivered events are in the
store, so a restart continues with them; an event may therefore arrive twice, with the same
``webhook-id``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Self

import httpx2

from sglang_coserve.batch.context import JobContext
from sglang_coserve.batch.record import BatchEvent
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.config import BatchApiConfig
from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.lines.background import backoff_s
from sglang_coserve.network import http_address

_SECRET_VARIABLE: Final = "COSERVE_WEBHOOK_SECRET"
_SECRET_PREFIX: Final = "whsec_"
_MIN_SECRET_BYTES: Final = 16
_TIMEOUT_S: Final = 15.0
_AT_ONCE: Final = 16
_POLL_S: Final = 1.0
_FIRST_DELAY_S: Final = 5.0
_MAX_DELAY_S: Final = 3600.0
_GIVE_UP_AFTER_S: Final = 3 * 86_400.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """The address of the receiver, and the secret shared with it.

    Raises:
        ConfigError: the address or the secret cannot be used.
    """

    url: str
    secret: str = field(repr=False)
    """``whsec_`` and base64, as the specification writes it."""

    @classmethod
    def of(cls, config: BatchApiConfig) -> Self | None:
        """Return where the ends of batches are delivered; None if nowhere.

        Raises:
            ConfigError: the address, or the secret in the environment, cannot be used.
        """
        if config.batch_webhook_url is None:
            return None
        secret = os.environ.get(_SECRET_VARIABLE, "")
        return cls(config.batch_webhook_url, secret)

    def __post_init__(self) -> None:
        http_address(self.url, "--batch-webhook-url")
        if len(self.key) < _MIN_SECRET_BYTES:
            raise ConfigError(
                f"the webhook secret must have at least {_MIN_SECRET_BYTES} bytes: set "
                f"{_SECRET_VARIABLE} to whsec_ and what `openssl rand -base64 32` prints"
            )

    @property
    def key(self) -> bytes:
        """The secret's bytes."""
        try:
            return base64.b64decode(self.secret.removeprefix(_SECRET_PREFIX), validate=True)
        except ValueError:  # Also of what is no ASCII.
            raise ConfigError("the webhook secret must be whsec_ and base64") from None


def signed_headers(event_id: str, now_s: float, body: bytes, key: bytes) -> dict[str, str]:
    """Return the headers that prove who sent ``body``, and when."""
    timestamp = str(int(now_s))
    signed = b".".join((event_id.encode(), timestamp.encode(), body))
    signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{signature}",
    }


@asynccontextmanager
async def events_delivered(context: JobContext, target: WebhookTarget) -> AsyncGenerator[None]:
    """Deliver the ends of batches within this context; see the module's docstring."""
    # The authorities of the environment count, and its proxies do not.
    verify = httpx2.create_ssl_context()
    async with httpx2.AsyncClient(timeout=_TIMEOUT_S, verify=verify, trust_env=False) as client:
        deliveries = _Deliveries(context, target, client)
        async with context.background.running("webhooks", deliveries.run):
            yield


class _Deliveries:
    def __init__(
        self, context: JobContext, target: WebhookTarget, client: httpx2.AsyncClient
    ) -> None:
        self._context = context
        self._target = target
        self._url = httpx2.URL(target.url)
        self._client = client

    async def run(self) -> None:
        store, clock = self._context.store, self._context.clock
        while True:
            events = await store.run(batch_rows.due_events, clock.now_s(), _AT_ONCE)
            async with asyncio.TaskGroup() as tasks:
                for event in events:
                    tasks.create_task(self._deliver(event))
            if not events:
                await clock.sleep(_POLL_S)

    async def _deliver(self, event: BatchEvent) -> None:
        context = self._context
        try:
            await self._send(event)
        except Exception as error:  # Whatever it is, the next one may be delivered.
            now_s = context.clock.now_s()
            reason = str(error) or type(error).__name__
            if now_s - event.created_at_s > _GIVE_UP_AFTER_S:
                _log.error("%s of %s given up: %s", event.type, event.batch_id, reason)
            else:
                _log.warning("%s of %s not delivered: %s", event.type, event.batch_id, reason)
                failures = event.attempts + 1
                pause_s = backoff_s(failures, _FIRST_DELAY_S, _MAX_DELAY_S, context.rng)
                await context.store.run(batch_rows.postpone_event, event.id, now_s + pause_s)
                return
        await context.store.run(batch_rows.settle_event, event.id)

    async def _send(self, event: BatchEvent) -> None:
        fields = {
            "id": event.id,
            "object": "event",
            "type": event.type,
            "created_at": int(event.created_at_s),
            "data": {"id": event.batch_id},
        }
        body = json.dumps(fields, separators=(",", ":")).encode()
        headers = signed_headers(event.id, self._context.clock.now_s(), body, self._target.key) | {
            "content-type": "application/json",
        }
        # An answer says enough by its status: the rest, however long it is, is not read.
        async with (
            asyncio.timeout(_TIMEOUT_S),
            self._client.stream("POST", self._url, content=body, headers=headers) as response,
        ):
            if not response.is_success and response.status_code != HTTPStatus.GONE:
                raise ServerError(f"HTTP {response.status_code} from {self._url.host}")
