"""What a gateway and an engine say to each other about lines.

The two may be of different versions. So fields that a reader does not know are ignored, and every
field that is newer than the first version has a default that is right where it is missing.
"""

from __future__ import annotations

import json
from typing import Final, TypeVar

import msgspec

from sglang_coserve.errors import RequestError, ServerError
from sglang_coserve.http_lines.engine_load import WantedLines
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import LineResult, MovedKv
from sglang_coserve.lines.result_record import decode_json

LINES_PATH: Final = "/coserve/lines"
"""GET: what the engine is (``EngineReport``). POST: one attempt at a line (``LineRequest``), whose
answer is JSON lines (``LineEvent``)."""

DELAYS_PATH: Final = f"{LINES_PATH}/delays"
HAND_BACK_PATH: Final = f"{LINES_PATH}/hand_back"
LOAD_PATH: Final = "/coserve/load"
"""Where an engine says how loaded it is, for routers and autoscalers."""

RUN_HEADER: Final = "x-coserve-run"
"""Names the run of the engine that answers, as in ``EngineReport.run``."""

HEARTBEAT: Final = b"\n"
"""Says that the engine is there, while it has nothing to say of the line."""

HEARTBEAT_S: Final = 5.0
"""Longest silence of an engine in an answer. Proxies end answers that are silent for a minute."""

GATHER_S: Final = 0.005
"""Tokens that come within this time go in one message. Lines take seconds, and each message costs
the same however many tokens it has."""

_Message = TypeVar("_Message", bound=msgspec.Struct)


class EngineLostError(ServerError):
    """The connection to the engine broke, could not be made, or is silent for too long."""


class EngineRefusesError(ServerError):
    """The engine answers, and not as an engine of ours: the wrong key, or another program."""


class LineEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message about an attempt, with one of ``tokens``, ``result`` and ``moved``."""

    tokens: tuple[int, ...] = ()
    """Token ids generated since the last message."""

    prompt_tokens: int = 0
    """Length of the prompt, with the first ``tokens`` of a line that can be handed back."""

    result: LineResult | None = None
    """The outcome of the attempt; the last message."""

    moved: str | None = None
    """Why the line is to go on in another engine; the last message."""

    kv: MovedKv | None = None
    """With ``moved``: KV of the line that the engine has left for the next one."""


class HandBack(msgspec.Struct, frozen=True):
    """The attempt that an engine is to hand back (``HAND_BACK_PATH``)."""

    attempt: str
    """``LineRequest.attempt``."""


class EngineReport(msgspec.Struct, frozen=True):
    """What an engine is and how it stands, for a gateway that asks twice a second."""

    run: str
    """Another value after each start of the engine. Sums of delays begin again at 0 then."""

    model: str
    """Fingerprint of what generates tokens (``LineBackend.model``)."""

    models: tuple[str, ...]
    """Names that lines may ask for: the model's, then the adapters'."""

    endpoints: tuple[str, ...]
    limits: BodyLimits = BodyLimits()
    """Limits of one line."""

    refuses: str | None = None
    """Why the engine takes no lines now; None while it takes lines."""

    pulse_age_s: float = 0.0
    """Seconds since all schedulers of the engine were last heard of."""

    lines: int = 0
    """Lines that the engine has, of all gateways."""

    running: int = 0
    """Offline requests that hold KV."""

    waiting: int = 0
    """Offline requests that wait in the engine."""

    online_running: int = 0
    """Online requests that hold KV."""

    most_lines: int | None = None
    """Most lines that it is to have at a time; None if ``running`` and ``waiting`` say it."""

    expected_tokens_per_s: float | None = None
    """Predicted rate of offline work; None if unknown."""

    pool: str | None = None
    """``strict`` or ``relaxed``; anything else: the engine begins and ends lines itself."""

    wants: WantedLines | None = None
    """Lines that an engine of the strict pool wants; None while it wants none."""


class EngineDelays(msgspec.Struct, frozen=True):
    """By how much batches have delayed the engine's online requests."""

    run: str
    """See ``EngineReport.run``."""

    online_delays_s: dict[str, float] | None = None
    """See ``Backend.online_delays_s``."""


def encode_message(message: msgspec.Struct) -> bytes:
    """Return a message as JSON on one line, its end included."""
    try:
        return msgspec.json.encode(message) + b"\n"
    except UnicodeEncodeError:
        # Lone surrogates are valid in JSON, as escapes.
        return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode() + b"\n"


def decode_message(content: bytes, kind: type[_Message]) -> _Message:
    """Return the message in ``content``.

    Raises:
        RequestError: the content is not of this ``kind``; the text says where.
    """
    try:
        return decode_json(content, kind)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not a {kind.__name__}: {error}") from None
