"""The middleware alone: bodies in pieces, streams in pieces, and what it leaves untouched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError
from sglang_coserve.guard.bodies import RequestGateMiddleware
from sglang_coserve.srt.marks.http_marks import SERVICE_TIERS, class_of_body
from sglang_coserve.srt.marks.marks_middleware import MARKED_PATHS, MarksMiddleware
from sglang_coserve.srt.marks.offline_marks import attach_marks
from sglang_coserve.srt.marks.request_marks import with_client_marks


class Inner:
    """An ASGI app that records what it got, and what it would send, and answers with pieces."""

    def __init__(self, content_type: str, pieces: Sequence[bytes], status: int = 200) -> None:
        self._content_type = content_type
        self._pieces = pieces
        self._status = status
        self.body: bytes | None = None
        self.sent_params: Any = None
        self.custom_params: dict[str, Any] | None = None
        self.config = CoserveConfig()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.body = (await receive())["body"]
        params = SimpleNamespace(custom_params=with_client_marks(self.custom_params, self.config))
        self.sent_params = params.custom_params
        attach_marks(params)
        headers = [(b"content-type", self._content_type.encode())]
        if self._content_type == "application/json":
            headers.append((b"content-length", str(sum(map(len, self._pieces))).encode()))
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def call(
    app: Any,
    body: bytes,
    path: str = "/v1/chat/completions",
    chunk_bytes: int = 7,
    headers: Sequence[tuple[bytes, bytes]] = (),
    root_path: str = "",
    below: float | None = None,
) -> tuple[int, bytes, dict[bytes, bytes]]:
    """Run one request through the middleware; return status, body and headers."""
    chunks = [body[i : i + chunk_bytes] for i in range(0, len(body), chunk_bytes)] or [b""]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": root_path,
        "headers": [(b"content-length", str(len(body)).encode()), *headers],
    }
    names = CoserveConfig().offline_objectives
    middleware = RequestGateMiddleware(MarksMiddleware(app, names, below))
    asyncio.run(middleware(scope, receive, send))
    received = b"".join(m["body"] for m in sent if m["type"] == "http.response.body")
    return sent[0]["status"], received, dict(sent[0]["headers"])


FLEX = json.dumps({"service_tier": "flex", "messages": []}).encode()


@pytest.mark.parametrize("path", sorted(MARKED_PATHS))
def test_a_mark_in_a_body_goes_with_what_the_route_sends(path: str) -> None:
    """The body passes as it is."""
    app = Inner("application/json", [b'{"a":', b"1}"])
    _, body, headers = call(app, FLEX, path=path)
    assert app.body == (FLEX if path != "/v1/decisions" else b'{"messages":[]}')
    assert app.sent_params == {"coserve_class": "offline"}
    assert headers[b"x-coserve-class"] == b"offline"
    has_tier = path in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
    assert json.loads(body) == ({"service_tier": "flex", "a": 1} if has_tier else {"a": 1})
    assert int(headers[b"content-length"]) == len(body)


@pytest.mark.parametrize("headers", [(), ((b"x-gateway-inference-objective", b"batch-jobs"),)])
def test_a_response_in_the_background_names_its_tier_itself(
    headers: Sequence[tuple[bytes, bytes]],
) -> None:
    fields = {"background": True} if headers else {"background": True, "service_tier": "flex"}
    said = b'{"id":"resp_1","service_tier":"flex"}'
    app = Inner("application/json", [said])
    body = json.dumps(fields).encode()
    _, answer, answered = call(app, body, path="/v1/responses", headers=headers)
    assert answer == said
    assert answered[b"x-coserve-class"] == b"offline"


@pytest.mark.parametrize(
    ("headers", "fields", "request_class"),
    [
        ({"x-smg-priority": "bulk"}, {}, "offline"),
        ({"x-smg-priority": " Bulk"}, {"service_tier": "default"}, "offline"),
        ({"x-smg-priority": "interactive"}, {"service_tier": "flex"}, "offline"),
        ({"x-smg-priority": "default"}, {}, None),
        (
            {"x-smg-priority": "bulk", "x-llm-d-inference-objective": "chat"},
            {"service_tier": "flex"},
            "online",
        ),
        ({"x-dynamo-request-priority": "-1"}, {"priority": 5}, "offline"),
        ({"x-dynamo-request-priority": "-1"}, {"service_tier": "default"}, "offline"),
        ({"x-dynamo-request-priority": "2"}, {"priority": 0}, None),
        ({"x-dynamo-request-priority": "2"}, {"service_tier": "flex"}, "offline"),
        ({"x-dynamo-request-strict-priority": "0"}, {}, None),
        ({}, {"priority": 0}, "offline"),
        ({}, {"priority": 1}, None),
        ({}, {"priority": True}, None),
        ({}, {"priority": 0, "service_tier": "default"}, "online"),
        ({}, {"nvext": {"agent_hints": {"priority": 0}}, "priority": 3}, "offline"),
        ({}, {"nvext": {"agent_hints": {"priority": 3}}, "priority": 0}, None),
        ({}, {"nvext": []}, None),
    ],
)
def test_priorities_of_neighbours(
    headers: dict[str, str], fields: dict[str, Any], request_class: str | None
) -> None:
    app = Inner("application/json", [b"{}"])
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    body = json.dumps(fields).encode()
    status, _, answered = call(app, body, path="/generate", headers=sent, below=1)
    assert (status, app.body) == (200, body)
    assert answered.get(b"x-coserve-class") == (request_class and request_class.encode())
    if not headers and "service_tier" not in fields:  # Numbers name no class by themselves.
        _, _, answered = call(Inner("application/json", [b"{}"]), body, path="/generate")
        assert b"x-coserve-class" not in answered


def test_a_priority_that_is_no_number_is_refused() -> None:
    sent = [(b"x-dynamo-request-priority", b"high")]
    app = Inner("application/json", [b"{}"])
    status, body, _ = call(app, b"{}", path="/generate", headers=sent, below=1)
    assert status == 400 and b"use a number" in body


def test_an_error_of_the_route_passes_unchanged() -> None:
    status, body, _ = call(Inner("application/json", [b'{"error":1}'], status=503), FLEX)
    assert (status, body) == (503, b'{"error":1}')


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/tokenize", "/flush_cache"])
def test_other_routes_are_not_read(path: str) -> None:
    app = Inner("application/json", [b"{}"])
    _, _, headers = call(app, FLEX, path=path, chunk_bytes=10_000)
    assert (app.body, app.sent_params) == (FLEX, None)
    assert b"x-coserve-class" not in headers


def test_targets_go_along_and_the_response_is_stock() -> None:
    app = Inner("application/json", [b'{"a":1}'])
    app.custom_params = {"x": 1}
    fields = {"coserve_slo_ttft_ms": 250, "coserve_slo_tpot_ms": 40.5, "custom_params": {"x": 1}}
    status, answer, headers = call(app, json.dumps(fields).encode())
    assert app.sent_params == {"x": 1, "coserve_slo_ttft_ms": 250, "coserve_slo_tpot_ms": 40.5}
    assert (status, answer) == (200, b'{"a":1}')
    assert b"x-coserve-class" not in headers


@pytest.mark.parametrize("tier", SERVICE_TIERS)
def test_the_answer_names_the_tier_used(tier: str) -> None:
    app = Inner("application/json", [b'{"a":1}'])
    _, answer, _ = call(app, json.dumps({"service_tier": tier}).encode())
    assert json.loads(answer)["service_tier"] == ("flex" if tier == "flex" else "default")


@pytest.mark.parametrize("tier", ["fast", "standard_only"])
def test_a_tier_that_sglang_refuses_is_not_shown_to_it(tier: str) -> None:
    app = Inner("application/json", [b'{"a":1}'])
    call(app, json.dumps({"service_tier": tier, "input": "x"}).encode(), path="/v1/responses")
    assert app.body is not None
    assert json.loads(app.body) == {"service_tier": "auto", "input": "x"}
    assert app.sent_params == {"coserve_class": "online"}


def test_a_route_that_refuses_unknown_fields_is_shown_no_marks() -> None:
    """With a length that is that of what it is shown."""
    app = Inner("application/json", [b"{}"])
    fields = {"service_tier": "flex", "coserve_deadline_s": 60, "input": "x"}
    call(app, json.dumps(fields).encode(), path="/v1/decisions")
    assert app.body == b'{"input":"x"}'
    assert app.sent_params == {"coserve_class": "offline", "coserve_deadline_s": 60}


# --- Headers ------------------------------------------------------------------------------


OBJECTIVE, OLDER_OBJECTIVE = b"x-llm-d-inference-objective", b"x-gateway-inference-objective"
TTL, OLDER_TTL = b"x-llm-d-inference-ttl", b"x-gateway-inference-ttl"
OFFLINE, ONLINE = {"coserve_class": "offline"}, {"coserve_class": "online"}
BATCH_NAMES = (b"batch", b"batch-sheddable-llama-3", b"best-effort-traffic", b"sheddable")
BATCH_NAMES += (b"sheddable-test", b"flex", b"offline")
OTHER_NAMES = (b"premium-traffic", b"interactive-default", b"not-batch", b"s")


def deadline(due_in_s: float) -> dict[str, Any]:
    return {**OFFLINE, "coserve_deadline_s": due_in_s}


def targets(**ms: float) -> dict[str, float]:
    return {f"coserve_slo_{name}_ms": value for name, value in ms.items()}


SAID: list[tuple[bytes, dict[bytes, bytes], dict[str, Any]]] = [
    *[(b"{}", {OLDER_OBJECTIVE: name}, OFFLINE) for name in BATCH_NAMES],
    *[(b"{}", {OLDER_OBJECTIVE: name}, ONLINE) for name in OTHER_NAMES],
    # A header wins over the body.
    (b'{"service_tier": "priority"}', {OBJECTIVE: b"batch"}, OFFLINE),
    # What the batch gateway of llm-d sends: milliseconds until the job's deadline, whatever its
    # window is; none when it is over.
    *[
        (
            b"{}",
            {name: b"batch-sheddable", b"x-slo-ttft-ms": ms, b"x-slo-tpot-ms": b"50"},
            deadline(due_in_s),
        )
        for name in (OBJECTIVE, OLDER_OBJECTIVE)
        for ms, due_in_s in (
            *((b"86399000", 86399.0), (b"2592000000", 2592000.0), (b"1e300", 1e9), (b"0", 1e-6)),
        )
    ],
    # The newer name of a header wins.
    (
        b"{}",
        {OBJECTIVE: b"batch", TTL: b"90s", OLDER_OBJECTIVE: b"chat", OLDER_TTL: b"10s"},
        deadline(90.0),
    ),
    (
        b"{}",
        {
            OBJECTIVE: b"chat",
            b"x-slo-ttft-ms": b"1000",
            b"x-llm-d-slo-ttft-ms": b"250",
            b"x-llm-d-slo-tpot-ms": b"40.5",
        },
        {**ONLINE, **targets(ttft=250, tpot=40.5)},
    ),
    # The TTL is the deadline of an offline request, and of an online one the gateway's own.
    *[
        (FLEX, {TTL: ttl}, deadline(seconds))
        for ttl, seconds in (
            *((b"90s", 90.0), (b"1500ms", 1.5), (b"1m30s", 90.0), (b"1.5h", 5400.0)),
            (b"1h0.5s", 3600.5),
        )
    ],
    (b"{}", {TTL: b"90s"}, {}),
    # Of two deadlines the earlier one counts.
    (FLEX, {TTL: b"90s", b"x-slo-ttft-ms": b"5000"}, deadline(5.0)),
    # Those of SGLang's router.
    (b"{}", {b"x-sgl-ttft-slo-ms": b"250", b"x-sgl-tps-slo": b"20"}, targets(ttft=250, tpot=50)),
    # A target in a header wins, and none is too large.
    (
        b'{"coserve_slo_ttft_ms": 250}',
        {b"x-slo-ttft-ms": b"2592000000", b"x-slo-tpot-ms": b"0"},
        targets(ttft=1e9),
    ),
]


@pytest.mark.parametrize(("body", "headers", "sent"), SAID)
def test_headers_of_gateways_say_class_targets_and_deadline(
    body: bytes, headers: dict[bytes, bytes], sent: dict[str, Any]
) -> None:
    app = Inner("application/json", [b'{"a":1}'])
    status, answer, answered = call(app, body, headers=tuple(headers.items()))
    assert (status, app.sent_params or {}) == (200, sent)
    is_offline, said = sent.get("coserve_class") == "offline", {"a": 1}
    if "coserve_class" in sent:
        assert answered[b"x-coserve-class"].decode() == sent["coserve_class"]
        said |= {"service_tier": "flex" if is_offline else "default"}
    assert json.loads(answer) == said


@pytest.mark.parametrize(
    ("objective", "within", "sent"),
    [
        (b"batch", {"coserve_class": "online", "coserve_slo_tpot_ms": 50}, OFFLINE),
        (b"chat", {"coserve_class": "offline", "coserve_deadline_s": 60}, ONLINE),
        (b"chat", {"coserve_slo_tpot_ms": 50}, {**ONLINE, **targets(tpot=50)}),
    ],
)
def test_a_class_of_a_gateway_wins_over_all_that_a_client_says(
    objective: bytes, within: dict[str, Any], sent: dict[str, Any]
) -> None:
    app = Inner("application/json", [b"{}"])
    app.custom_params = within
    call(app, json.dumps(within).encode(), headers=[(OBJECTIVE, objective)])
    assert app.sent_params == sent


def test_a_gateway_need_not_know_what_the_server_ignores() -> None:
    app = Inner("application/json", [b"{}"])
    app.config = CoserveConfig(offline_policy="non_preemptive")
    assert call(app, b'{"a": 1}', headers=[(b"x-slo-ttft-ms", b"250")])[0] == 200
    assert "coserve_slo_ttft_ms" not in (app.sent_params or {})


@pytest.mark.parametrize("ttl", [b"", b"90", b"s", b"-1s", b"0s", b"1 m", b"1d", b"9" * 80 + b"s"])
def test_a_ttl_that_is_no_duration_is_refused(ttl: bytes) -> None:
    app = Inner("application/json", [b"{}"])
    status, answer, _ = call(app, FLEX, headers=[(b"x-llm-d-inference-ttl", ttl)])
    assert (status, app.body) == (400, None)
    assert b"use a duration above 0 such as 90s" in answer


def test_a_form_is_not_read_but_its_headers_are() -> None:
    app = Inner("application/json", [b"{}"])
    headers = [
        (b"content-type", b"multipart/form-data; boundary=x"),
        (b"x-llm-d-inference-objective", b"batch"),
    ]
    call(app, FLEX, path="/v1/audio/transcriptions", headers=headers)
    assert app.body == FLEX[:7]
    assert app.sent_params == {"coserve_class": "offline"}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (b"x-llm-d-slo-ttft-ms", b"soon", "x-llm-d-slo-ttft-ms is 'soon': use a number"),
        (b"x-slo-ttft-ms", b"nan", "x-slo-ttft-ms is 'nan': use a number of milliseconds"),
        (b"x-slo-tpot-ms", b"-5", "x-slo-tpot-ms is '-5': use a number of milliseconds"),
        (b"x-sgl-ttft-slo-ms", b"0", "x-sgl-ttft-slo-ms is '0': use a number of milliseconds"),
        (b"x-sgl-tps-slo", b"inf", "x-sgl-tps-slo is 'inf': use a number of tokens per second"),
    ],
)
def test_a_header_that_cannot_be_read_is_a_bad_request(
    name: bytes, value: bytes, told: str
) -> None:
    status, answer, _ = call(Inner("application/json", [b"{}"]), b"{}", headers=[(name, value)])
    assert status == 400
    assert told in json.loads(answer)["error"]["message"]


# --- Bodies -------------------------------------------------------------------------------


unmarked_keys = st.text().filter(
    lambda key: key != "service_tier" and not key.startswith("coserve_")
)
unmarked_values = st.integers() | st.sampled_from(["coserve_class", "my coserve_x", "service_tier"])


@given(
    st.dictionaries(unmarked_keys, unmarked_values),
    st.dictionaries(st.sampled_from(["service_tier", "coserve_slo_ttft_ms"]), st.none()),
)
def test_a_body_without_marks_passes_byte_for_byte(
    fields: dict[str, Any], nulls: dict[str, None]
) -> None:
    body = json.dumps(fields | nulls).encode()
    app = Inner("application/json", [b'{"a":1}'])
    _, answer, _ = call(app, body)
    assert app.body == body
    assert answer == b'{"a":1}'


event_texts = st.text().map(lambda text: json.dumps({"text": text}))


@given(
    st.lists(
        st.lists(
            event_texts | st.just(json.dumps({"text": 'data: {"x":1}\n\ndata: {'})), min_size=1
        ),
        min_size=1,
    )
)
def test_every_event_gets_the_tier_and_keeps_its_text(groups: list[list[str]]) -> None:
    """Each piece holds whole events, as SGLang sends them."""
    pieces = ["".join(f"data: {event}\n\n" for event in group).encode() for group in groups]
    _, body, _ = call(Inner("text/event-stream", [*pieces, b"data: [DONE]\n\n"]), FLEX)
    # Split as a client does: only \n ends a line of these streams.
    events = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part]
    assert events.pop() == "[DONE]"
    sent = [json.loads(event) for group in groups for event in group]
    assert [json.loads(event) for event in events] == [
        {"service_tier": "flex", **event} for event in sent
    ]


def test_marks_may_agree_and_those_that_disagree_are_refused() -> None:
    for fields in (
        {"service_tier": "auto", "coserve_class": "offline"},
        {"service_tier": "flex", "custom_params": {"coserve_class": "offline"}},
        {"sampling_params": {"custom_params": {"coserve_class": "offline"}}},
    ):
        assert class_of_body(fields) is RequestClass.OFFLINE
    for online in (
        {"coserve_class": "online"},
        {"sampling_params": {"custom_params": {"coserve_class": "online"}}},
    ):
        with pytest.raises(RequestError, match="contradicting"):
            class_of_body({"service_tier": "flex", **online})


def test_two_values_of_one_target_are_refused() -> None:
    app = Inner("application/json", [b"{}"])
    app.custom_params = {"coserve_slo_ttft_ms": 300}
    with pytest.raises(RequestError, match="contradicting values of coserve_slo_ttft_ms: 250"):
        call(app, json.dumps({"coserve_slo_ttft_ms": 250}).encode())
    call(app, json.dumps({"coserve_slo_ttft_ms": 300}).encode())
    assert app.sent_params == {"coserve_slo_ttft_ms": 300}


@pytest.mark.parametrize("before", [b'"service_tier":null,', b""])
def test_events_with_a_response_inside_name_the_tier_there(before: bytes) -> None:
    text = json.dumps('{"response":{"service_tier":null')
    schema = {"properties": {"response": {"type": "string"}}}
    response = b'{"response":{' + before + b'"id":1,"text":' + text.encode()
    response += b',"schema":' + json.dumps(schema, separators=(",", ":")).encode() + b"}"
    events = (response + b"}", b'{"type":"x","sequence_number":1,' + response[1:] + b"}")
    pieces = [b"".join(b"event: x\ndata: " + event + b"\n\n" for event in events)]
    _, answer, _ = call(
        Inner("text/event-stream", [*pieces, b"data: [DONE]\n\n"]), FLEX, path="/v1/responses"
    )
    for sent in answer.split(b"\n\n")[:2]:
        said = json.loads(sent.split(b"data: ")[1])["response"]
        assert said == {
            "service_tier": "flex",
            "id": 1,
            "text": json.loads(text),
            "schema": schema,
        }


class Stock:
    """What SGLang's route makes of a body, as far as its JSON goes."""

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        try:
            fields = orjson.loads((await receive())["body"])
            status = 200 if isinstance(fields, dict) else 400
        except orjson.JSONDecodeError:
            status = 400
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


marks = st.sampled_from([b'"service_tier":"flex"', b'"coserve_class":"offline"'])
odd = st.sampled_from(
    [b'"\\ud800"', b'"\xed\xa0\x80"', b"1e999", b"NaN", str(1 << 80).encode(), b'"\xff"', b"\xef"]
    + [b"[" * n + b"]" * n for n in (200, 300, 900, 1100, 100_000)]
    + [b'{"a":' * n + b"1" + b"}" * n for n in (300, 1100, 100_000)]
)
raw = st.binary(max_size=30) | odd | st.text(max_size=9).map(lambda text: json.dumps(text).encode())


@given(marks, st.lists(raw, max_size=4), st.sampled_from([b",", b":", b',"a":', b""]))
def test_no_bytes_fare_worse_with_a_mark(mark: bytes, pieces: list[bytes], between: bytes) -> None:
    for body in (
        b"{" + between.join([mark, *pieces]) + b"}",
        b'{"a":' + between.join([*pieces, mark]) + b"}",
        between.join([mark, *pieces]),
        b'{"a":' + b"".join(pieces[:1]) + b"," + mark + b"}",
    ):
        marked, unread = (
            call(Stock(), body, path, chunk_bytes=1 << 20)[0]
            for path in ("/v1/completions", "/v1/tokenize")
        )
        assert marked == unread


def test_a_root_path_stands_before_the_route() -> None:
    app = Inner("application/json", [b"{}"])
    _, _, headers = call(app, FLEX, "/x/v1/chat/completions", root_path="/x")
    assert headers[b"x-coserve-class"] == b"offline"
