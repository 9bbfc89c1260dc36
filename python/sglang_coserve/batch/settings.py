"""The settings of the Batch API as its parts take them."""

from __future__ import annotations

import os
from typing import Final

from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.webhooks import WebhookTarget
from sglang_coserve.config import BatchApiConfig

__all__ = ["SECRET_VARIABLE", "limits_of", "webhook_target_of"]

SECRET_VARIABLE: Final = "COSERVE_WEBHOOK_SECRET"


def limits_of(config: BatchApiConfig) -> BatchLimits:
    """Return the limits that ``config`` sets, and the defaults of the others."""
    stored_gib = config.batch_max_stored_gib_per_key
    return BatchLimits(
        max_upload_bytes=config.batch_max_upload_mib << 20,
        max_lines=config.batch_max_lines,
        max_in_flight=config.batch_max_in_flight,
        max_active_batches=config.batch_max_active,
        max_active_batches_per_owner=config.batch_max_active_per_key,
        max_stored_bytes_per_owner=None if stored_gib is None else int(stored_gib * (1 << 30)),
        max_files_per_owner=config.batch_max_files_per_key,
    )


def webhook_target_of(config: BatchApiConfig) -> WebhookTarget | None:
    """Return where the ends of batches are delivered; None if nowhere.

    Raises:
        ConfigError: the address, or the secret in the environment, cannot be used.
    """
    if config.batch_webhook_url is None:
        return None
    return WebhookTarget(
        config.batch_webhook_url,
        os.environ.get(SECRET_VARIABLE, ""),
        allow_private=config.batch_webhook_allow_private,
    )
