"""The corpus: requests with fields at their extremes, by door.

The fields of ``/generate`` and ``/encode`` are those of the installed SGLang, with values made from
their types. Each other request ended or stalled an engine process, or was tried because it might.
The test says what the answer is to be.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

GENERATE, ENCODE = "/generate", "/encode"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

INF, NAN = float("inf"), float("nan")
NUMBERS: Final = (
    *(0, -1, 0.5, 5e-324, 1e-310, 1e-300, 1e-45, 1e-30, 1e30, 1e300, 1e308, NAN, INF, -INF),
    *(10**12, 2**31, 2**32, 2**62, 2**63, -(2**63) - 1, 10**30, 10**400),
)
TYPES: Final = ("x", "", True, None, [], [1], ["x"], [[]], {}, {"x": 1}, [None], "\ud800")

FEW_NUMBERS: Final = (-1, 0, 0.5, 5e-324, 1e-300, NAN, 10**12, 2**62, 2**63, 10**400)
FEW_TYPES: Final = ("x", True, [1], {"x": 1}, "\ud800")
"""For fields that are checked in the same place as others with more."""


def values_of(type_: Any, *, few: bool = False) -> list[Any]:
    """Return JSON values for a field of this type: some that fit, too deep ones, and other kinds.

    ``few`` leaves most of them out, for what is inside of a list or an object.
    """
    values = [*_fitting(type_, few=few), *(FEW_TYPES[:2] if few else FEW_TYPES)]
    if not few:
        values += [[[value]] for value in values[:2]] + [
            {"x": {"x": value}} for value in values[:2]
        ]
        values += [[], {}, 2**64]
    return list({repr(value): value for value in values}.values())


def _fitting(type_: Any, *, few: bool) -> Iterator[Any]:
    parts, origin = get_args(type_), get_origin(type_)
    if origin is Annotated:
        yield from _fitting(parts[0], few=few)
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _fitting(part, few=few)
    elif origin is Literal:
        yield from parts
    elif origin in (list, tuple, set):
        for value in values_of(parts[0], few=True):
            yield [value]
    elif origin is dict and parts:
        for value in values_of(parts[1], few=True):
            yield {"x": value}
    elif type_ is bool:
        yield from (True, False)
    elif type_ in (int, float):
        yield from FEW_NUMBERS[:3] if few else NUMBERS
    elif type_ is str:
        yield from ("x",) if few else ("x", "", "x" * 10_000, "\ud800")
    else:
        yield from (1, "x", {"x": 1}) if few else TYPES


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


_CYCLE: Final = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}
_TREE: Final = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "value": {"type": "integer"}},
}
SCHEMAS: Final[dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "itself-in-any-of": {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    "itself-in-all-of": {"allOf": [{"$ref": "#"}]},
    "cycle": _CYCLE,
    "tree": _TREE,
    "array-of-itself": {"type": "array", "items": {"$ref": "#"}},
    "required-of-itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "deep-100": _nested(100),
    "deep-150": _nested(150),
    "missing-definition": {"$ref": "#/$defs/none"},
    "remote": {"$ref": "http://127.0.0.1:1/schema.json"},
    "enum-20000": {"enum": [f"value {n}" for n in range(20_000)]},
    "properties-2000": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string"} for n in range(2_000)},
    },
    "optional-300": {
        "type": "object",
        "properties": {f"p{n}": {"type": "integer"} for n in range(300)},
        "required": [],
        "additionalProperties": True,
    },
    "any-of-any-of": {
        "anyOf": [{"anyOf": [{"const": n + m} for n in range(40)]} for m in range(40)]
    },
    "min-items": {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
    "max-items": {"type": "array", "items": {"type": "string"}, "maxItems": 10**9},
    "max-length": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "pattern": {"type": "string", "pattern": "((a{1,500}){1,500}){1,500}"},
    "range": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "range-int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "pattern-properties": {"type": "object", "patternProperties": {"(a|b|c){1,3000}": {}}},
    "false": False,
    "true": True,
    "null": None,
    "number": 3,
    "list": [],
    "types": {"type": ["string", "nothing", 3]},
    "not": {"not": {}},
    "bad-types": {"type": "object", "properties": [], "required": 7},
}

REGEXES: Final[dict[str, str]] = {
    "repeated-exponentially": "(((((a{1,90}){1,90}){1,90}){1,90}){1,90})",
    "repeated-1e6": "a{1000000}",
    "repeated-1e9": "[a-z]{1,1000000000}",
    "alternatives": "|".join(f"(a{n}|b{n})*" for n in range(3_000)),
    "nested-stars": "((((((a*)*)*)*)*)*)*b",
    "nested-2000": "(" * 2_000 + "a" + ")" * 2_000,
    "nested-50000": "(" * 50_000 + "a" + ")" * 50_000,
    "unbalanced": "((a",
    "look-ahead": "(?=a)(?!b)a",
    "back-reference": r"(a+)\1",
    "nothing": "(?!)",
    "class": "[",
    "unicode": r"[\x{0}-\x{110000}]",
    "dots": ".{1,2000}" * 50,
    "empty-set": "[^\\s\\S]",
    "null": "\x00",
}

EBNFS: Final[dict[str, str]] = {
    "itself": "root ::= root",
    "left-recursive": 'root ::= root "a" | "a"',
    "cycle": "root ::= a\na ::= b\nb ::= a",
    "nothing": "root ::= ",
    "no-root": 'a ::= "a"',
    "empty-loop": 'root ::= ("")*',
    "empty-loops": 'root ::= (("a"*)*)*',
    "repetition": 'root ::= ("a"{1,1000}){1,1000}',
    "repetition-1e9": 'root ::= "a"{1000000000}',
    "nested": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "many-rules": "root ::= r0\n"
    + "\n".join(f"r{n} ::= r{n + 1}" for n in range(5_000))
    + '\nr5000 ::= "a"',
    "doubling": "root ::= r0\n"
    + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40))
    + '\nr40 ::= "a"',
    "ambiguous": 'root ::= (s s s | s)\ns ::= s s | "a" | "b" | ""',
    "bad": "::= ::= |",
    "undefined": "root ::= nowhere",
}

STRUCTURAL_TAGS: Final[dict[str, Any]] = {
    "empty": {},
    "no-triggers": {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": []},
    "empty-trigger": {
        "structures": [{"begin": "", "schema": {}, "end": ""}],
        "triggers": [""],
    },
    "itself": {
        "structures": [{"begin": "<a>", "schema": {"$ref": "#"}, "end": "</a>"}],
        "triggers": ["<a"],
    },
    "no-begin": {"structures": [{"schema": {}}], "triggers": ["<a"]},
    "bad-types": {"structures": 3, "triggers": {}},
    "unknown-format": {"type": "structural_tag", "format": {"type": "nothing"}},
    "format-itself": {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": {"$ref": "#"}},
    },
    "list": [],
    "number": 1,
}

STOP_REGEXES: Final[dict[str, Any]] = {
    "backtracking": "(.*)*(.*)*(.*)*\x01",
    "backtracking-words": r"(\w+\s?)*\x01",
    "backtracking-classes": "([a-zA-Z]+)*\x01",
    "backtracking-alternatives": "(a|a|b|b|.|.)*\x01",
    "nested-9000": "(" * 9_000 + "a" + ")" * 9_000,
    "long": "(a?){1000}" * 30,
    "repeat": "(.{0,1000}){0,1000}\x01",
    "many": [f"(.*{n})*\x01" for n in range(200)],
    "back-reference": r"(.*)\1\1\1\x01",
    "look-behind": "(?<=a*)b",
    "unbalanced": "(((",
}


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """One request: what it is named by in a report, its path and its body as it is sent."""

    name: str
    path: str
    content: bytes
    headers: tuple[tuple[str, str], ...] = ()


def corpus() -> Iterator[HostileRequest]:
    """Every request, in an order that is the same each time."""
    yield from _native_requests()
    yield from _openai_requests()
    yield from _odd_bodies()
    yield from _timed_requests()
    yield from _media_requests()


def _native(name: str, params: Any = None, **fields: Any) -> HostileRequest:
    body: dict[str, Any] = {"text": "The old mill by the river"}
    body["sampling_params"] = {"max_new_tokens": 8, "ignore_eos": True, **(params or {})}
    if "input_ids" in fields or "input_embeds" in fields:
        del body["text"]
    body.update(fields)
    return HostileRequest(f"generate {name}", GENERATE, _json(body))


def _openai(path: str, name: str, **fields: Any) -> HostileRequest:
    body: dict[str, Any] = {"model": "small", "max_tokens": 8}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "Who mended the lamp?"}]
    else:
        body["prompt"] = "The old mill by the river"
    return HostileRequest(f"{path} {name}", path, _json({**body, **fields}))


def _native_requests() -> Iterator[HostileRequest]:
    # Where this is read without SGLang's fields, nobody needs SGLang.
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    for name, type_ in get_type_hints(SamplingParams).items():
        for value in values_of(type_):
            yield _native(f"{name}={_told(value)}", {name: value})
    for name, type_ in get_type_hints(GenerateReqInput).items():
        for value in values_of(type_):
            yield _native(f"{name}={_told(value)}", **{"return_logprob": True, name: value})
    for name, type_ in get_type_hints(EmbeddingReqInput).items():
        for value in values_of(type_, few=True):
            content = _json({"text": "The old mill by the river", name: value})
            yield HostileRequest(f"encode {name}={_told(value)}", ENCODE, content)
    yield _native("no_such_parameter", {"no_such_parameter": 1})
    for kind, values in (
        ("json_schema", {key: json.dumps(value) for key, value in SCHEMAS.items()}),
        ("regex", REGEXES),
        ("ebnf", EBNFS),
        ("structural_tag", {key: json.dumps(value) for key, value in STRUCTURAL_TAGS.items()}),
        ("stop_regex", STOP_REGEXES),
    ):
        for name, value in values.items():
            # Long enough for what is slow to be slow.
            length = 200 if kind == "stop_regex" else 8
            yield _native(f"{kind} {name}", {kind: value, "max_new_tokens": length})
    yield from _native_combinations()


_FIELD_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "input_ids": (
        *([10**6], [2**63], [-1, 5], [1, "2", 3.5, None], [[], []], [[5, 6], []]),
        *([1.0, 2.0], [True, False]),
    ),
    "input_embeds": ([[0.5] * 64] * 3, [[NAN] * 64] * 3, [[0.5], [0.5, 1.0]]),
    "text": (["a", 5], [], ""),
    "rid": ("r" * 10**6, "HEALTH_CHECK_1"),
    "session_params": ({"id": "none"}, {"unknown": 1}, {"id": 5, "offset": "x"}),
    "image_data": ("http://127.0.0.1:1/x.png", "/etc/hostname"),
    "custom_logit_processor": ('{"callable": "00"}',),
    "token_ids_logprob": ([-1], [10**9], [5] * 20_000, [[1], [2]]),
    "logprob_start_len": (-5,),
    "multi_item_delimiter_indices": ([10**6, -3],),
    "return_hidden_states": ("everything",),
    "return_sampling_mask": (True,),
    "bootstrap_host": ("2.2.2.2",),
    "sampling_params": ([{"n": 1}, {"n": 2}], []),
    "extra_key": (["a", "b"],),
    "lora_path": ("../../etc",),
}


def _native_combinations() -> Iterator[HostileRequest]:
    everywhere = {str(token): 1e29 for token in range(500)}
    many = {str(token): -1e29 for token in range(500)}
    log_probabilities = {"return_logprob": True, "top_logprobs_num": 3}
    for params in (
        *(
            {"logit_bias": bias}
            for bias in (everywhere, many, {"5": 1e308}, {"5": INF}, {"5": -INF}, {"5": NAN})
        ),
        *({"logit_bias": bias} for bias in ({"5": "1"}, {"five": 1}, {"-5": 1}, {"99999999": 1})),
        {"logit_bias": {"5": 1e30}, "temperature": 1e-6},
        {"logit_bias": {"5": -1e30}, "temperature": 1.1e-6},
        *({"temperature": value} for value in (1.0001e-6, 3e38, 1e39)),
        {"top_p": 1e-45, "temperature": 1},
        {"min_p": 1, "temperature": 1},
        {"min_p": 1, "temperature": 3e38},
        {"frequency_penalty": 2, "presence_penalty": 2},
        {
            "frequency_penalty": -2,
            "presence_penalty": -2,
            "repetition_penalty": 2,
            "min_new_tokens": 4,
        },
        {"repetition_penalty": 1e-38, "temperature": 1},
        {"repetition_penalty": 1e-20},
        {"repetition_penalty": 1e-30, "temperature": 1},
        *({"stop_token_ids": ids, "min_new_tokens": 4} for ids in ([10**9], [-1])),
        {"stop_token_ids": [2**64]},
        {"stop_token_ids": list(range(500)), "min_new_tokens": 8},
        *({"stop": stop} for stop in ([f"word {n}" for n in range(5_000)], "x" * 100_000)),
        {"stop": ["", ""]},
        {"max_new_tokens": 0},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"regex": "[a-z]{1,4}", "repetition_penalty": 1.5},
        {"regex": "ab", "min_new_tokens": 8},
        {"regex": "[a-c]+", "logit_bias": many},
        {"custom_params": {"__req__": 1}},
        {"custom_params": {"a": {"b": {"c": {"d": []}}}}},
        {"custom_params": {"thinking_budget": -5}},
    ):
        yield _native(_told(params), params)
        yield _native(f"{_told(params)}, log-probabilities", params, **log_probabilities)
    for field, values in _FIELD_VALUES.items():
        for value in values:
            more = {"return_logprob": True} if "logprob" in field else {}
            yield _native(f"{field}={_told(value)}", **more, **{field: value})
    for fields in (
        {"text": ["a"] * 2000, "sampling_params": {"n": 1000}},
        {"text": ["a", "b"], "rid": ["r", "r"]},
        {"text": ["a", "b"], "return_logprob": [True]},
        {"text": ["a", "b"], "top_logprobs_num": [1]},
    ):
        yield _native(_told(fields), **fields)
    for name, marks in _MARKS.items():
        yield _native(f"marks {name}", {"custom_params": marks})
        yield _native(
            f"marks {name}, log-probabilities", {"custom_params": marks}, return_logprob=True
        )


_MARKS: Final[dict[str, Any]] = {
    "class": {"coserve_class": "batch"},
    "unknown": {"coserve_clas": "offline"},
    "generated": {"coserve_class": "offline", "_coserve_generated": [5, 6, 7]},
    "due": {"coserve_class": "offline", "_coserve_due_in_s": -1e9},
    "job": {"coserve_class": "offline", "_coserve_job": "batch_1"},
    "future": {"_coserve_anything": 1},
    "malformed": {"coserve_class": "offline", "_coserve_generated": {"a": "b"}},
}


def _openai_requests() -> Iterator[HostileRequest]:
    numeric = (
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "min_tokens", "max_tokens", "n", "seed", "best_of"),
        *("logprobs", "top_logprobs", "max_completion_tokens", "priority"),
    )
    other = (
        *("stop", "stop_token_ids", "stop_regex", "logit_bias", "response_format", "regex", "ebnf"),
        *("json_schema", "custom_params", "lora_path", "rid", "cache_salt", "session_params"),
        *("custom_logit_processor", "return_hidden_states", "suffix", "echo", "user", "tools"),
        *("tool_choice", "chat_template_kwargs", "reasoning_effort", "prompt", "messages"),
        *("stream_options", "metadata", "logprob_start_len", "bootstrap_room", "return_token_ids"),
    )
    for path in (COMPLETIONS, CHAT):
        for field in numeric:
            for value in (*FEW_NUMBERS, "x"):
                yield _openai(path, f"{field}={_told(value)}", **{field: value})
        for field in other:
            for value in (*FEW_TYPES, 2**64):
                yield _openai(path, f"{field}={_told(value)}", **{field: value})
        for name, schema in SCHEMAS.items():
            described = {"name": "answer", "schema": schema}
            format_ = {"type": "json_schema", "json_schema": described}
            yield _openai(path, f"response_format {name}", response_format=format_)
        for name, marks in _MARKS.items():
            yield _openai(path, f"marks {name}", custom_params=marks)
        yield _openai(path, "all at once", n=3, logprobs=True, stream=True, seed=-1)
    for name, value in {
        "batch with a bad one": [[5, 6], [10**9]],
        "many": ["a"] * 300,
        "nested": [[["a"]]],
    }.items():
        yield _openai(COMPLETIONS, f"prompt {name}", prompt=value)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    yield _openai(CHAT, "tool itself", tools=[tool], tool_choice="required")
    strict = {**tool, "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    yield _openai(CHAT, "strict tool itself", tools=[strict], tool_choice="auto")


_TIMES: Final = (*NUMBERS, 1e-3, 9e-4, 1e9)
_TIME_MARKS: Final = {
    "coserve_slo_ttft_ms": "x-slo-ttft-ms",
    "coserve_slo_tpot_ms": "x-llm-d-slo-tpot-ms",
    "coserve_deadline_s": "x-llm-d-inference-ttl",
}


def _timed_requests() -> Iterator[HostileRequest]:
    """Times in marks and in headers; each request gets more than one token."""
    for mark, header in _TIME_MARKS.items():
        is_offline = mark == "coserve_deadline_s"
        for value in (*_TIMES, *FEW_TYPES):
            marks = {mark: value, **({"coserve_class": "offline"} if is_offline else {})}
            told = f"{mark}={_told(value)}"
            yield _native(f"marks {told}", {"custom_params": marks})
            yield _openai(COMPLETIONS, told, temperature=0, **marks)
        for value in (*_TIMES, "x", ""):
            text = f"{_told(value)}{'s' if is_offline else ''}"
            flex = {"service_tier": "flex"} if is_offline else {}
            plain = _openai(COMPLETIONS, f"header {header}: {text}", **flex)
            yield replace(plain, headers=((header, text),))


PICTURE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAIAAAAn5KxJAAAARklEQVR42u3OMQ0AMAgAMJ"
    "gQlOA/yJoKDpJWQXOq44IXR4iKioqKioqKioqKioqKioqKioqKioqKioqKioqKioqKioqKbvsdXgGSrhHLMQAAAABJRU"
    "5ErkJggg=="
)
SCHEMA_ANSWER: Final = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "integer"}},
}


def bomb(side: int) -> str:
    """Return a black PNG of ``side`` x ``side`` pixels, each of which is a bit, as a URL."""
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side * (1 + -(-side // 8))), 9)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")):
        checked = kind + data
        content += struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _media_requests() -> Iterator[HostileRequest]:
    """A multimodal model serves some of them; any other ignores or refuses the picture."""
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    black = {"type": "image_url", "image_url": {"url": bomb(13_000)}}
    text = {"type": "text", "text": "Who mended the lamp?"}
    for name, content in {
        "one": [image, text],
        "two": [image, text, image],
        "alone": [image],
        "many": [image] * 30,
        "bomb": [black],
        "bombs": [black] * 20,
        "cut": [{"type": "image_url", "image_url": {"url": PICTURE[:90]}}, text],
        "no picture": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
        "odd": [{"type": "image_url", "image_url": {"url": "\ud800"}}],
    }.items():
        messages = [{"role": "user", "content": content}]
        for tier in ("default", "flex"):
            fields = {"messages": messages, "service_tier": tier}
            yield _openai(CHAT, f"picture {name}, {tier}", **fields)
            yield _openai(
                CHAT, f"schema, picture {name}, {tier}", **fields, response_format=SCHEMA_ANSWER
            )
    for value in NUMBERS:
        for field in ("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch"):
            yield _native(f"picture {field}={_told(value)}", image_data=PICTURE, **{field: value})
    for ids in ([10**9], [-1], [2**31], [2**32], [2**62], [985], [983, 985, 984], [5] * 3000):
        named = _told(ids)
        yield _native(f"ids {named}", input_ids=ids)
        yield _native(f"picture, ids {named}", input_ids=ids, image_data=PICTURE)
        yield _openai(COMPLETIONS, f"ids {named}", prompt=ids)
        yield _openai(COMPLETIONS, f"offline ids {named}", prompt=ids, service_tier="flex")
    for hashes in (["ff" * 32], ["00"], ["x"], [""], [1], "ff", [["ff"]]):
        yield _native(f"picture, mm_hashes {hashes}", image_data=PICTURE, mm_hashes=hashes)


def _odd_bodies() -> Iterator[HostileRequest]:
    for path in (GENERATE, COMPLETIONS, CHAT):
        for name, content in {
            "nothing": b"",
            "a list": b"[]",
            "null": b"null",
            "not json": b"{",
            "deep": b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
            "binary": b"\xff\xfe\x00",
            "marked deep": b'{"coserve_class":' * 3_000 + b"1" + b"}" * 3_000,
            "surrogate": b'{"coserve_class": "\\ud800", "prompt": "\\ud800"}',
        }.items():
            yield HostileRequest(f"{path} body {name}", path, content)


def _json(body: Any) -> bytes:
    # As a hostile client does: NaN, and characters that are none, included.
    return json.dumps(body).encode()


def _told(value: Any) -> str:
    text = "a number of 400 digits" if value == 10**400 else repr(value)
    return text[:40]
