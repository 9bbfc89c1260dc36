"""What ``/coserve/view`` says, as far as a terminal shows it, whatever version the server has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct


class _Bill(Struct):
    requests: float = 0.0
    mean_ms: float | None = None
    ttft_ms: float | None = None
    gaps_ms: float | None = None


class _Slo(Struct):
    slo: str = "?"
    measured_ms: float | None = None
    online_alone_ms: float | None = None
    added_ms: float | None = None
    limit_ms: float | None = None
    met: bool = False


class _Users(Struct):
    level: str = "unknown"
    text: str = ""
    bill: _Bill | None = None


class _EngineUsers(_Users):
    slos: list[_Slo] = []


class _Running(Struct):
    running: float | None = None


class _Load(Struct):
    online: _Running = msgspec.field(default_factory=_Running)
    offline: _Running = msgspec.field(default_factory=_Running)


class _Engine(Struct):
    url: str = "?"
    state: str = "?"
    takes_no_lines_because: str | None = None
    lines_in_flight: int = 0
    window: int | None = None
    offline_tokens_per_s: float | None = None
    load: _Load | None = None
    online_users: _Users | None = None


class _Fleet(Struct):
    lines_waiting: int = 0
    offline_tokens_per_s: float | None = None


class _Counts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class _Extra(Struct):
    paused: bool = False
    eta: float | None = None
    eta_p95: float | None = None


class _Batch(Struct):
    id: str = "?"
    status: str = "?"
    completed_at: float | None = None
    expires_at: float | None = None
    request_counts: _Counts = msgspec.field(default_factory=_Counts)
    coserve: _Extra = msgspec.field(default_factory=_Extra)


class _Batches(Struct):
    path: str | None = None
    data: list[_Batch] = []
    error: str | None = None


class _Decision(Struct):
    at: float = 0.0
    steps: int = 0
    text: str = ""


class _Headroom(Struct):
    headroom_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    required_tokens_per_s: float | None = None


class _View(Struct):
    at: float = 0.0
    model: str | None = None
    batches: _Batches | None = None
    headroom: _Headroom | None = None


class _OfServer(_View):
    policy: str | None = None
    sample_age_s: float | None = None
    online_users: _EngineUsers = msgspec.field(default_factory=_EngineUsers)
    history: dict[str, list[float | None]] = {}
    decisions: list[_Decision] = []


class _OfFleet(_View):
    online_users: _Users = msgspec.field(default_factory=_Users)
    engines: list[_Engine] = []
    fleet: _Fleet = msgspec.field(default_factory=_Fleet)


def shown_view(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of ``answer``, with a default for what it does not have."""
    kind = _OfFleet if "engines" in answer else _OfServer
    view = kind()
    for field in msgspec.structs.fields(kind):
        with suppress(KeyError, msgspec.ValidationError, OverflowError):
            setattr(view, field.name, msgspec.convert(answer[field.name], field.type))
    shown: dict[str, Any] = msgspec.to_builtins(view)
    return shown
