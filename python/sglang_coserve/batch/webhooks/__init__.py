"""Annex: webhooks, which tell a web address that a batch has ended (``--batch-webhook-url``)."""

from __future__ import annotations

from functools import partial
from typing import Final

from sglang_coserve.batch.annex import Annex
from sglang_coserve.batch.context import EventDelivery
from sglang_coserve.batch.webhooks.delivery import WebhookTarget, events_delivered
from sglang_coserve.config import BatchApiConfig


def _event_delivery(config: BatchApiConfig) -> EventDelivery | None:
    target = WebhookTarget.of(config)
    return None if target is None else partial(events_delivered, target=target)


WEBHOOKS: Final = Annex(event_delivery=_event_delivery)
