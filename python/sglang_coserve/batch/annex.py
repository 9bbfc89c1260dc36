"""Describes an annex of the Batch API: an optional folder, without which the rest works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter

from sglang_coserve.batch.context import EventDelivery
from sglang_coserve.config import BatchApiConfig


def _no_delivery(_config: BatchApiConfig) -> EventDelivery | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Annex:
    """An optional part of the Batch API, registered in ``api.ANNEXES`` and imported nowhere else.

    Without it, its paths are answered as any other that an application does not have.
    """

    routers: tuple[APIRouter, ...] = ()
    """Routes at paths of their own. Each route bounds what it reads of a body."""

    first_routers: tuple[APIRouter, ...] = ()
    """Routes at paths at which the application has routes, too. The routes here come
    first, and leave other requests to the application's."""

    endpoints: Mapping[str, Any] = field(default_factory=dict)
    """Functions that a GET of a path must reach, by the path; see ``api.missing_routes``."""

    event_delivery: Callable[[BatchApiConfig], EventDelivery | None] = _no_delivery
    """Returns what delivers the ends of batches; None if the settings ask for none.

    It raises ``ConfigError`` for settings that cannot be used.
    """
