"""How loaded an engine is: what online work holds, and what online work can reclaim.

An engine full of offline work is idle to an online request: whatever offline requests hold is
given up for the online request. So a load is given by class, and KV that can be reclaimed apart
from the KV of online requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, field_validator

from sglang_coserve.config.coserve import Pool
from sglang_coserve.json_documents import JsonDocument

_Some = Annotated[int, Field(ge=1)]


class ClassLoad(JsonDocument):
    """The requests of one class in an engine."""

    running: NonNegativeInt = 0
    """Those that hold KV: prefilling, decoding, paused or in a suspended step."""

    waiting: NonNegativeInt = 0

    outstanding_tokens: NonNegativeInt = 0
    """Tokens of them that are yet to be computed: prompts, and outputs as long as they are
    expected to become, else as they may become."""


@dataclass(frozen=True, slots=True)
class WantedLines:
    """The running lines that a strict engine would take over (``fleet.pools``)."""

    tokens: int
    """Tokens of context that it prefers, from 1."""

    max_tokens: int
    """Tokens of context that fit, of all lines that it takes over together; from 1."""

    lines: int
    """Most lines, from 1."""


class ReplicaLoad(JsonDocument):
    """What the scheduler of one replica reports."""

    online: ClassLoad
    offline: ClassLoad

    kv_tokens: NonNegativeInt
    """Tokens whose KV fits the device."""

    online_kv_tokens: NonNegativeInt
    """Of them, those that online requests hold. Shared prefixes count once."""

    reclaimable_kv_tokens: NonNegativeInt
    """Those that online requests can reclaim: of offline requests alone, or only cached. The rest
    is free."""

    reclaim_s: NonNegativeFloat
    """How long an online request is predicted to wait for them: until the step under way can be
    suspended, or ends."""

    headroom_tokens_per_s: NonNegativeFloat
    """Prompt and output tokens a second that offline work would get now, predicted: the rate of an
    engine without online requests, by the part of the time that they leave and that offline work
    may fill. 0 once offline work has stopped."""

    max_lines: NonNegativeInt
    """Offline requests, of the length of those that are there, that fit in at a time beside the
    online ones."""

    pool: Pool | None = None
    """None: it begins and ends lines itself."""

    wants: WantedLines | None = None
    """Of a strict engine; None while it wants none."""

    @field_validator("wants", mode="before")
    @classmethod
    def _read_wants(cls, value: Any) -> Any:
        """Take the fields of a dataclass, too, which strict documents would refuse."""
        return WantedLines(**value) if isinstance(value, dict) else value


class KvFormat(JsonDocument):
    """What KV looks like: taken over by another engine only where it is the same there."""

    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    tp_size: int
    pp_size: int
    page_size: int


class Versions(JsonDocument):
    """Of the software that serves."""

    sglang_coserve: str
    sglang: str


class EngineLoad(ReplicaLoad):
    """What ``GET /coserve/load`` answers: all replicas of a server together, and what it serves."""

    replicas: _Some
    age_s: NonNegativeFloat
    """Age of the oldest report among the replicas."""

    is_draining: bool
    """True once it takes no more offline lines, and is to end."""

    model_name: str
    """As clients call it."""

    models: tuple[str, ...] = ()
    """All names that requests may ask for: ``model_name``, and then adapters."""

    model: str
    """Fingerprint of the weights in use, the tokenizer, and what decides numbers. Tokens that
    were generated under one are not continued under another."""

    kv_fingerprint: str
    """The same of the KV: of ``model`` and ``kv_format``."""

    kv_format: KvFormat
    versions: Versions


def total(loads: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """Return the load of a server with these replicas, at least one.

    Counts and rates add up. A request goes to any replica, so the time to reclaim is the longest.
    """
    return ReplicaLoad(
        online=_together([load.online for load in loads]),
        offline=_together([load.offline for load in loads]),
        kv_tokens=sum(load.kv_tokens for load in loads),
        online_kv_tokens=sum(load.online_kv_tokens for load in loads),
        reclaimable_kv_tokens=sum(load.reclaimable_kv_tokens for load in loads),
        reclaim_s=max(load.reclaim_s for load in loads),
        headroom_tokens_per_s=sum(load.headroom_tokens_per_s for load in loads),
        max_lines=sum(load.max_lines for load in loads),
        pool=loads[0].pool,
        wants=_wanted([load.wants for load in loads]),
    )


def _wanted(wants: Sequence[WantedLines | None]) -> WantedLines | None:
    """Return the lines that any replica would take over: nobody knows which one gets them."""
    known = [each for each in wants if each is not None]
    if len(known) < len(wants):
        return None
    return WantedLines(
        tokens=min(each.tokens for each in known),
        max_tokens=min(each.max_tokens for each in known),
        lines=min(each.lines for each in known),
    )


def _together(loads: Sequence[ClassLoad]) -> ClassLoad:
    return ClassLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        outstanding_tokens=sum(load.outstanding_tokens for load in loads),
    )
