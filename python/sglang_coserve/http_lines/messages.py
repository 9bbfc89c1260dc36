"""What is said about a line between the process that keeps it and the engine.

The two may be of different versions. So fields that a reader does not know are ignored, and what
came later than the first version has a default that is right where it is missing. An attempt may
end without an answer (``LineMovedError``, or an error here), none of it the line's fault.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from sglang_coserve.errors import RequestError, ServerError
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import LineRequest, LineResult, MovedKv

_Message = TypeVar("_Message", bound=msgspec.Struct)

_KEYS: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class EngineLostError(ServerError):
    """The engine cannot be reached, has ended, or says nothing any more."""

    def __init__(self, message: str, *, had_the_line: bool) -> None:
        super().__init__(message)
        self.had_the_line = had_the_line
        """False when it surely never got it."""


class EngineRefusesError(ServerError):
    """The engine is there and does not speak with us: the wrong key, or another program."""


def refusal_text(address: str, status: int, content: bytes) -> str:
    """Return what an answer other than 200 says, and how to mend it."""
    hint = ""
    if status in _KEYS:
        hint = ": its --admin-api-key is not the gateway's --engine-admin-key"
    elif status == HTTPStatus.NOT_FOUND:
        hint = ": it is no server of sglang_coserve, or has no --admin-api-key"
    text = content[:300].decode(errors="replace").strip()
    return f"{address} answers HTTP {status}{hint} ({text})"


LINES_PATH: Final = "/coserve/lines"
DELAYS_PATH: Final = f"{LINES_PATH}/delays"
LOAD_PATH: Final = "/coserve/load"
"""Where an engine says how loaded it is (``http_lines.engine_load``)."""

HEARTBEAT: Final = b"\n"
"""Says that the engine is there."""

HEARTBEAT_S: Final = 5.0
"""How long an engine that has nothing to say is silent."""

GATHER_S: Final = 0.005
"""What happens within so much of a message goes with the next one. Lines take seconds; on each
side the cost is that of a message, however much there is in it."""

_CALL_ID: Final = re.compile(rb'\{"id":([1-9][0-9]{0,17})[,}]')


class LineCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message to the engine."""

    id: int
    """Names the attempt on its stream, from 1. First, and of a fixed form: ``call_id`` reads it
    where the rest cannot be read."""

    attempt: LineRequest | None
    """What is to begin; None to end what has begun."""

    is_wanted: bool = False
    """Of what is to end: whether it goes on elsewhere, and is to be handed back with all that the
    engine has of it. Otherwise nobody wants the answer any more."""


class LineEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of the engine. Beside the attempt's ``id`` exactly one field says something, but
    for what is said with another."""

    id: int = 0

    tokens: tuple[int, ...] = ()
    """New ones, after those before."""

    prompt_tokens: int = 0
    """With the first ``tokens``: how long the prompt is. The context is that and the tokens."""

    result: LineResult | None = None
    """The end: what became of the attempt."""

    moved: str | None = None
    """The end: why the line is to go on elsewhere."""

    kv: MovedKv | None = None
    """With ``moved``, what was left of the line."""

    fault: str | None = None
    """The end of the stream, and no attempt's: what is wrong with what was sent."""


class EngineDescription(msgspec.Struct, frozen=True):
    """What ``Backend`` says of itself, beside serving lines."""

    model: str
    endpoints: tuple[str, ...]

    limits: BodyLimits = BodyLimits()
    """What one line may be."""

    expected_tokens_per_s: float | None = None
    """Of offline work, now; None if unknown."""

    refuses: str | None = None
    """Why the engine takes no lines now; None when it does."""


class EngineDelays(msgspec.Struct, frozen=True):
    """By how much batches have delayed the engine's online requests."""

    run: str
    """Another one after each start of the engine: sums begin again at 0."""

    online_delays_s: dict[str, float] | None = None
    """See ``Backend.online_delays_s``."""


def call_id(content: bytes) -> int | None:
    """Return the id in the beginning of a ``LineCall``; None if there is none."""
    match = _CALL_ID.match(content)
    return int(match[1]) if match else None


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
        RequestError: it is none of ``kind``; the text says where.
    """
    try:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if b"\\u" not in content:
                raise
            return msgspec.convert(json.loads(content), kind)  # Lone surrogates, perhaps.
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not a {kind.__name__}: {error}") from None
