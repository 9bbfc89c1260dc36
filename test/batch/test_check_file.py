"""What is found wrong with an input file, and that nothing in one can hurt the check."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.scenarios import line, lines
from batch.scripted_backend import ENDPOINT
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.body_limits import mended_json
from sglang_coserve.jsonl.check_file import (
    CheckLimits,
    FileReport,
    check_file,
    estimate_file,
)
from sglang_coserve.jsonl.lines import SeenIds
from sglang_coserve.jsonl.request_line import estimate_tokens, id_in, parse_request_line
from sglang_coserve.lines.background import run_module

LIMITS = CheckLimits(max_lines=1000, max_line_bytes=4000, max_faults=5, context_tokens=4096)


def check(content: bytes, limits: CheckLimits = LIMITS) -> FileReport:
    return check_file(io.BytesIO(content), ENDPOINT, limits)


def check_written(path: Path, content: bytes, limits: CheckLimits = LIMITS) -> FileReport:
    """Large lines are mapped, so they have to be in a file."""
    path.write_bytes(content)
    with path.open("rb") as file:
        return check_file(file, ENDPOINT, limits)


def checked_apart(path: Path) -> Any:
    arguments = (str(path), ENDPOINT, json.dumps(asdict(LIMITS)), str(path))
    module = "sglang_coserve.jsonl.check_file"
    return asyncio.run(run_module("checking it", module, *arguments))


def checked_with_full_folders(path: Path, **variables: str) -> Any:
    """Check a file in a process whose files may have 4 MiB each, and no temporary one of SQLite's
    anything."""
    limits = asdict(replace(LIMITS, max_lines=200_000))
    module = "sglang_coserve.jsonl.check_file"
    command = (sys.executable, "-m", module, path, ENDPOINT, json.dumps(limits), f"{path}.order")
    found = subprocess.run(
        command,
        env={**os.environ, **variables},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20)),
        capture_output=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr.decode()
    return json.loads(found.stdout)


def test_a_file_is_checked_where_no_folder_takes_what_is_sorted(tmp_path: Path) -> None:
    path = tmp_path / "input"
    count = 100_000
    path.write_bytes(b"".join(a_line(custom_id=f"{n}") + b"\n" for n in range(count)))
    report = checked_with_full_folders(path, SQLITE_TMPDIR="")
    assert (report["requests"], report["faults"]) == (count, [])
    path.write_bytes(path.read_bytes() + a_line(custom_id="7"))
    (fault,) = checked_with_full_folders(path, SQLITE_TMPDIR="")["faults"]
    assert (fault["code"], fault["line"]) == ("duplicate_custom_id", count + 1)
    assert [left.name for left in tmp_path.iterdir()] == ["input"]


def test_ids_that_find_no_room_say_which_folder_lacks_it() -> None:
    seen = SeenIds(in_memory=True)
    assert [seen.add(text) for text in ("a", "b", "a")] == [True, True, False]
    seen._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StorageError, match="SQLITE_TMPDIR"):
        for number in range(1000):
            seen.add(str(number))


def codes(content: bytes, limits: CheckLimits = LIMITS) -> list[tuple[str, int | None]]:
    return [(fault.code, fault.line) for fault in check(content, limits).faults]


def a_line(**fields: Any) -> bytes:
    valid = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}}
    given = {name: value for name, value in (valid | fields).items() if value is not ...}
    return json.dumps(given).encode()


@pytest.mark.parametrize(
    "ending", [b"\n", b"\r\n", b"\n\n \t\n"], ids=["plain", "windows", "blank lines"]
)
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n"], ids=["", "bom", "blank"])
@pytest.mark.parametrize("end", [b"", b"\n"], ids=["no last ending", "last ending"])
def test_endings_marks_and_blank_lines_do_not_matter(
    start: bytes, ending: bytes, end: bytes
) -> None:
    report = check(start + ending.join(lines(3).splitlines()) + end)
    assert (report.requests, report.faults) == (3, [])


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json_line"),
        (b'{"custom_id": NaN}', "invalid_json_line"),
        (b'{"custom_id": 1e999}', "invalid_json_line"),
        (b'{"custom_id":"\xff"}', "invalid_json_line"),
        (b"\x00\x01\x02", "invalid_json_line"),
        (b"[" * 2000 + b"]" * 2000, "invalid_json_line"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "invalid_request"),
        (a_line(body={"prompt": 0}).replace(b"0", b"[" * 520 + b"]" * 520), "invalid_json_line"),
        (a_line(body={"prompt": 0}).replace(b"0", b"[" * 970 + b"]" * 970), "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"null", "invalid_json_line"),
        (b'"text"', "invalid_json_line"),
        *(
            (a_line(**{name: ...}), "invalid_request")
            for name in ("custom_id", "method", "url", "body")
        ),
        (a_line(custom_id=7), "invalid_request"),
        (a_line(custom_id=""), "invalid_request"),
        (a_line(custom_id="x" * 513), "invalid_request"),
        (a_line(custom_id="b", body={"model": "x" * 257}), "model_mismatch"),
        (a_line(method="GET"), "invalid_request"),
        (a_line(url="/v1/chat/completions"), "url_mismatch"),
        (a_line(url=["/v1/completions"]), "url_mismatch"),
        (a_line(body="{}"), "invalid_request"),
        (a_line(body=None), "invalid_request"),
        (a_line(body=[]), "invalid_request"),
        (b"x" * 3000, "invalid_json_line"),
    ],
)
def test_a_bad_line_is_named(content: bytes, code: str) -> None:
    good = line("good").encode()
    assert codes(b"\n".join([good, b"", content, line("last").encode()])) == [(code, 3)]


@pytest.mark.parametrize(
    "body",
    [{"prompt": "x" * 5000}, {"prompt": [[]] * 1_000_001}, {"prompt": "x" * 5000 + "\ud83d"}],
    ids=["long", "many values", "half a pair"],
)
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["", "bom"])
def test_a_line_that_is_too_large_fails_alone(
    tmp_path: Path, body: dict[str, Any], start: bytes
) -> None:
    large = a_line(custom_id="large", body=body)
    content = start + large + b"\r\n" + lines(2) + large.replace(b"large", b"id-1")
    report = check_written(tmp_path / "in", content)
    assert report.requests == 4
    (fault,) = report.faults
    assert (fault.code, fault.line) == ("duplicate_custom_id", 4)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"x" * 5000, "invalid_json_line"),
        (a_line(body=["x" * 5000]), "invalid_request"),
        (a_line(body={"prompt": "x" * 5000}, url="/v1/embeddings"), "url_mismatch"),
        (a_line(body={"prompt": "x" * 5000}, custom_id=[]), "invalid_request"),
        (a_line(custom_id="x" * 5000), "invalid_request"),
        (a_line(body={"model": "x" * 5000}), "model_mismatch"),
    ],
)
def test_a_large_line_is_checked_but_for_its_body(
    tmp_path: Path, content: bytes, code: str
) -> None:
    (fault,) = check_written(tmp_path / "in", lines(1) + content).faults
    assert (fault.code, fault.line) == (code, 2)


@pytest.mark.parametrize("content", [b'["\\\\ud83d"]', b'["\\ud83d\\ude00"]'])
def test_other_json_is_not_touched(content: bytes) -> None:
    assert mended_json(content) is content


halves = st.sampled_from(
    ["\ud83d", "\ude00", "\U0001f600", "\\", "\\ud83d", "u", "d83d", "\n", "é"]
)


@given(st.lists(halves, max_size=12))
def test_halves_are_mended_wherever_they_are(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    content = a_line(body={"prompt": ["x", text], text: {}})
    assert codes(content) == []
    assert parse_request_line(content, ENDPOINT).body == {"prompt": ["x", whole], whole: {}}


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_a_separator_of_text_ends_no_line(separator: str) -> None:
    text = f"a{separator}b"
    content = json.dumps(
        {"custom_id": text, "method": "POST", "url": ENDPOINT, "body": {"prompt": text}},
        ensure_ascii=False,
    ).encode()
    assert codes(content) == []
    assert parse_request_line(content, ENDPOINT).custom_id == text


NAMED = CheckLimits(1000, 4000, 5, 4096, model_names=("small", "poet"))


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({}, "small"),
        ({"model": None}, "small"),
        ({"model": "default"}, "small"),
        ({"model": "small"}, "small"),
        ({"model": "poet"}, "small:poet"),
        ({"model": "small:poet"}, "small:poet"),
        ({"model": "small", "prompt": "x" * 5000}, "small"),
        ({"model": 7}, "small"),
    ],
)
def test_the_model_of_the_first_line_is_that_of_the_batch(
    tmp_path: Path, body: dict[str, Any], model: str
) -> None:
    content = a_line(body=body) + b"\n" + a_line(custom_id="b", body={"model": "poet"})
    report = check_written(tmp_path / "in", content, NAMED)
    assert (report.model, report.faults) == (model, [])


@pytest.mark.parametrize("model", ["gpt-4o", "small:painter", "gpt-4o:poet", "Small", "x" * 5000])
def test_a_model_that_is_not_served_is_named_with_its_line(tmp_path: Path, model: str) -> None:
    content = lines(1) + a_line(body={"model": model})
    (fault,) = check_written(tmp_path / "in", content, NAMED).faults
    assert (fault.code, fault.line, fault.param) == ("model_mismatch", 2, "body.model")
    assert "'small', 'poet'" in fault.message
    assert len(fault.message) < 300


def test_azures_paths_are_openais() -> None:
    assert codes(a_line(url="/completions") + b"\n" + a_line(custom_id="A")) == []
    assert codes(a_line(url="/chat/completions")) == [("url_mismatch", 1)]
    request = parse_request_line(a_line(url="/completions"), None)
    assert request.url == ENDPOINT


def test_faults_and_lines_are_limited() -> None:
    assert [code for code, _ in codes(b"x\n" * 100)] == ["invalid_json_line"] * 5 + [
        "too_many_errors"
    ]
    assert codes(lines(1001)) == [("too_many_tasks", None)]
    assert codes(lines(1000)) == []


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"])
def test_an_empty_file(content: bytes) -> None:
    assert codes(content) == [("empty_file", None)]


def test_utf16_is_named_once() -> None:
    assert codes("{}\n{}".encode("utf-16")) == [("invalid_json_line", None)]


@given(content=st.binary(max_size=300))
def test_any_bytes_give_a_report(content: bytes) -> None:
    report = check(content)
    assert report.faults, "no such bytes are a batch"


@given(
    size_bytes=st.integers(0, 20_000),
    body=st.dictionaries(st.sampled_from(["max_tokens", "n"]), st.integers() | st.text()),
)
def test_no_answer_is_expected_to_be_longer_than_the_rest_of_the_context(
    size_bytes: int, body: dict[str, Any]
) -> None:
    prompt_tokens = estimate_tokens(size_bytes, {"max_tokens": 0}, 4096)
    assert size_bytes / 4 <= prompt_tokens <= size_bytes / 4 + 1
    tokens = estimate_tokens(size_bytes, body, 4096)
    assert prompt_tokens <= tokens <= max(prompt_tokens, 4096)


def test_limits_that_nobody_could_use_make_no_long_batch(tmp_path: Path) -> None:
    content = lines(20, max_tokens=1_000_000)
    assert 20 * 4000 < check(content).estimated_tokens <= 20 * 4096
    (path := tmp_path / "input.jsonl").write_bytes(content)
    assert estimate_file(path, ENDPOINT, 4096) == check(content).estimated_tokens


def test_the_process_says_what_the_function_says(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(lines(20))
    report = check(lines(20))
    assert checked_apart(path) == asdict(report)
    path.write_bytes(lines(1) + b"{\n")
    (fault,) = checked_apart(path)["faults"]
    assert (fault["code"], fault["line"]) == ("invalid_json_line", 2)


def test_what_a_process_says_is_bounded() -> None:
    with pytest.raises(StorageError, match="printed more than"):
        asyncio.run(run_module("counting", "timeit", "-n1", "-r1", "print('x' * (1 << 21))"))


def test_names_as_long_as_may_be_and_nesting_as_deep_are_taken() -> None:
    body = {"model": "m" * 256, "prompt": "nested", "flat": [[]] * 300}
    content = a_line(custom_id="x" * 512, body=body)
    assert codes(content.replace(b'"nested"', b"[" * 500 + b"]" * 500)) == []


@pytest.mark.parametrize(
    ("content", "custom_id"),
    [
        (a_line(url=5), "a"),
        (b'{"custom_id": "a", "body": 5, "body": {}}', "a"),
        (a_line(custom_id="x" * 513), None),
        (a_line(custom_id=7), None),
        (b'{"custom_id": "a", ', None),
        (b'{"custom_id": "\xff"}', None),
        (b'{"custom_id": "a", "body": ' + b"[" * 5000, None),
    ],
)
def test_a_line_that_is_no_request_is_named_where_it_can_be(
    content: bytes, custom_id: str | None
) -> None:
    assert id_in(content) == custom_id


def test_a_check_that_cannot_be_made_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        checked_apart(tmp_path / "gone")
