"""Peers of other versions: every message is read with fields that are unknown, and without those
that may be missing."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from batch.scripted_backend import ScriptedBackend, answer
from fleet.test_backend import finish_all, fleet_of, request, spread, until
from http_lines.live_engine import LiveEngine
from sglang_coserve.cli.batches import _details, batch_row
from sglang_coserve.client import JobState, JobStatus
from sglang_coserve.client.batch_api import batch_of
from sglang_coserve.client.job import check_outcome
from sglang_coserve.client.output_files import decode_record
from sglang_coserve.client.submission import Submission
from sglang_coserve.errors import InputFileError, RequestError, ServerError
from sglang_coserve.fleet.engine import EngineState
from sglang_coserve.fleet.report import Bill, OnlineUsers
from sglang_coserve.http_lines.engine_load import WantedLines
from sglang_coserve.http_lines.messages import (
    EngineDelays,
    EngineReport,
    LineEvent,
    decode_message,
)
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import FailureKind, LineRequest, LineResult, MovedKv
from sglang_coserve.lines.result_record import encode_record

KV = MovedKv("0" * 32, 48)


def message(kind: type[msgspec.Struct]) -> Callable[[bytes], Any]:
    return lambda content: decode_message(content, kind)


@dataclass(frozen=True)
class Case:
    """One message, with a value in every field."""

    value: Any
    read: Callable[[bytes], Any]

    @property
    def fields(self) -> Any:
        if isinstance(self.value, BaseModel):
            return self.value.model_dump(mode="json")
        return msgspec.to_builtins(self.value)


ATTEMPT = LineRequest(
    "batch_1", 3, "/v1/completions", {"prompt": "p"}, (1, 2), 5.0, 7, KV, 5.0, "m", "a"
)
REPORT = EngineReport(
    "run",
    "m",
    ("name", "adapter"),
    ("/v1/completions",),
    BodyLimits(1, 2, 3, 4),
    "it drains",
    1.5,
    4,
    3,
    1,
    2,
    64,
    5.0,
    "strict",
    WantedLines(1, 2, 3),
)
RESULT = LineResult(503, "id", {"error": {}}, True, FailureKind.UNAVAILABLE, 2.0)

CASES = {
    "an attempt": Case(ATTEMPT, message(LineRequest)),
    "tokens": Case(LineEvent((5, 6), 9), message(LineEvent)),
    "a result": Case(LineEvent(result=RESULT), message(LineEvent)),
    "a line that moves": Case(LineEvent(moved="it drains", kv=KV), message(LineEvent)),
    "what an engine is": Case(REPORT, message(EngineReport)),
    "delays": Case(EngineDelays("run", {"batch_1": 0.5}), message(EngineDelays)),
    "online users": Case(
        OnlineUsers("ok", "Fine.", 5, Bill(5, 34.0, 31.0, 3.0)), message(OnlineUsers)
    ),
    "a submission": Case(
        Submission("digest", "key", "file", "batch", True, {"id": "batch"}),
        lambda content: msgspec.json.decode(content, type=Submission),
    ),
}


def objects(value: Any, fields: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield each object within a message: the path to it, and what it is."""
    if isinstance(value, msgspec.Struct | BaseModel) or dataclasses.is_dataclass(value):
        yield path, value
        for name, inner in fields.items():
            yield from objects(at(value, (name,)), inner, (*path, name))


def defaults(value: Any) -> dict[str, Any]:
    """What may be missing of an object, and what it is then."""
    if isinstance(value, msgspec.Struct):
        found = {f.encode_name: f.default for f in msgspec.structs.fields(value)}
    elif isinstance(value, BaseModel):
        kinds = type(value).model_fields
        found = {name: f.default for name, f in kinds.items() if not f.is_required()}
    else:
        found = {f.name: f.default for f in dataclasses.fields(value)}
    return {
        name: default
        for name, default in found.items()
        if default is not msgspec.NODEFAULT and default is not dataclasses.MISSING
    }


def at(fields: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        if isinstance(fields, msgspec.Struct):
            said = {field.encode_name: field.name for field in msgspec.structs.fields(fields)}
            name = said[name]
        fields = fields[name] if isinstance(fields, dict | list) else getattr(fields, name)
    return fields


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_newer_peer_may_say_more(case: Case) -> None:
    fields = case.fields
    for path, _ in objects(case.value, case.fields):
        at(fields, path)["from_the_future"] = {"a": [1]}
    assert case.read(json.dumps(fields).encode()) == case.value


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_older_peer_may_say_less(case: Case) -> None:
    num_optional = 0
    for path, value in objects(case.value, case.fields):
        for name, default in defaults(value).items():
            fields = copy.deepcopy(case.fields)
            at(fields, path).pop(name, None)
            assert at(case.read(json.dumps(fields).encode()), (*path, name)) == default
            num_optional += 1
    assert num_optional


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_cannot_be_missing_is_named(case: Case) -> None:
    for path, value in objects(case.value, case.fields):
        for name in at(case.fields, path).keys() - defaults(value).keys():
            fields = copy.deepcopy(case.fields)
            del at(fields, path)[name]
            with pytest.raises((RequestError, ValidationError, msgspec.ValidationError)) as error:
                case.read(json.dumps(fields).encode())
            assert name in str(error.value)


def test_a_failure_of_an_unknown_kind_is_one() -> None:
    content = b'{"result":{"status_code":503,"request_id":"","body":{},"kind":"new"}}'
    result = decode_message(content, LineEvent).result
    assert result is not None and result.kind is FailureKind.FAILED


def test_records_of_other_versions_are_read() -> None:
    fields = json.loads(encode_record(255, 1, None, answer(request())))
    fields["response"]["from_the_future"] = 1
    content = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    assert decode_record(content).ok


def test_a_batch_of_a_server_of_another_version_is_shown() -> None:
    whole = {
        "id": "batch_1",
        "status": "failed",
        "completion_window": "24h",
        "created_at": 1_700_000_000,
        "expires_at": 1_700_086_400,
        "request_counts": {"total": 2, "completed": 1, "failed": 1},
        "usage": {"total_tokens": 5, "input_tokens": 3, "output_tokens": 2},
        "errors": {"data": [{"line": 1, "message": "bad", "code": "c"}]},
        "coserve": {"paused": True},
    }
    for path in ((), ("request_counts",), ("usage",), ("errors",), ("errors", "data", 0)):
        for name in at(whole, path):
            answer = copy.deepcopy(whole)
            inner = answer
            for step in path:
                inner = inner[step]
            inner["from_the_future"] = 1
            del inner[name]
            if not path and name in ("id", "status"):
                with pytest.raises(ServerError, match="no batch"):
                    batch_of(answer)
                continue
            batch = batch_of(answer)
            assert batch_row(batch) in _details(batch)
            assert JobStatus.of(JobState.RUNNING, batch, elapsed_s=1.0).batch_id == "batch_1"
            with pytest.raises(InputFileError):
                check_outcome(batch, "the file")


async def test_a_gateway_serves_with_engines_of_other_versions() -> None:
    """One that says more, or less, than it knows freezes none of them."""

    @dataclass(frozen=True)
    class NewerLimits(BodyLimits):
        max_images: int = 8

    class OlderEngine(LiveEngine):
        async def _report(self, report: EngineReport) -> EngineReport:
            """The least that says what it serves."""
            return EngineReport(report.run, report.model, report.models, report.endpoints)

    newer = LiveEngine(ScriptedBackend(holds=True, limits=NewerLimits(max_bytes=1000)))
    older = OlderEngine()
    async with fleet_of(newer, older) as fleet:
        async with asyncio.timeout(60):
            await fleet.engines.ready()
        assert {engine.state for engine in fleet.engines} == {EngineState.UP}
        assert fleet.limits == BodyLimits(max_bytes=1000)
        served = await spread(fleet, newer, older)
        await newer.kill()
        await older.holds(12)
        finish_all(older)
        await served.results()
        # It is still looked at.
        async with LiveEngine(port=newer.port):
            await until(lambda: {e.state for e in fleet.engines} == {EngineState.UP})
