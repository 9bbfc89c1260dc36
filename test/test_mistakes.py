"""Likely mistakes with every command that needs no engine: what, where, and how to mend it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from client.coserve_process import coserve

LINE = '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'
GATEWAY = "gateway --engine http://127.0.0.1:1 --engine-admin-key k"
SIMULATE = "simulate -o report"
MAX_LINES = 3
MAX_LINES_OF_PARSER = 6
"""Of typer, which adds how the command is used, in a frame."""

MISTAKES = {
    "submit missing.jsonl -o out.jsonl": "missing.jsonl: No such file",
    "submit folder -o out.jsonl": "save the lines to a file",
    "submit good.jsonl -o folder": "choose another output",
    "submit utf16.jsonl -o out.jsonl": "save it as UTF-8",
    "submit good.jsonl -o out.jsonl --base-url 127.0.0.1:30000": "use http://HOST:PORT",
    "submit good.jsonl -o out.jsonl --concurency 3": "--concurrency",
    "submit good.jsonl -o out.jsonl --retry-for -1": "greater than 0",
    "submit good.jsonl -o out.jsonl --concurrency 0": "greater than or equal",
    "submit good.jsonl -o out.jsonl --retry-for 1 --base-url http://127.0.0.1:1": "--base-url",
    "submit good.jsonl -o out.jsonl --retry-for 1 --base-url https://127.0.0.1:1": "with https?",
    "make-model good.jsonl": "name a directory",
    "make-model /dev/null/x": "/dev/null/x: Not a directory; name a path of directories",
    "make-model model --emulate none": "use one of",
    "make-model model --emulate llama-3.1-8b --profile folder": "coserve profile --model-path",
    "make-model model --emulate llama-3.1-8b --slow-spells 3": "such as 60:2:3",
    "profile --model-path model -o missing/profile.json": "a directory that exists",
    "profile --model-path model -o profile.json --kind none": "use one of",
    "replay missing.jsonl": "cannot be read: No such file",
    "replay folder": "cannot be read: Is a directory",
    "replay good.jsonl": "which --record-plans writes",
    "simulate -o full --duration 1": "No space left on device; free some space",
    f"{SIMULATE} --trace missing.csv": "cannot be read: No such file",
    f"{SIMULATE} --trace folder": "cannot be read: Is a directory",
    f"{SIMULATE} --trace columns.csv": "column",
    f"{SIMULATE} --trace negative.csv": "negative.csv:2",
    f"{SIMULATE} --offline folder": "folder",
    f"{SIMULATE} --profile good.jsonl": "good.jsonl",
    f"{SIMULATE} --model folder/config.json": "cannot be read: No such file",
    f"{SIMULATE} --model none": "use one of",
    f"{SIMULATE} --hardware none": "use one of",
    f"{SIMULATE} --policy none": "use one of",
    f"{SIMULATE} --slo 'ttft p99 < 300'": "write",
    f"{SIMULATE} --slo-ttft 300": "--slo-ttft-ms",
    f"{SIMULATE} --slo-ttft-ms 300ms": "a valid number",
    f"{SIMULATE} --slo-ttft-ms -300": "positive",
    "gateway": "add --engine",
    f"{GATEWAY}": "add --coserve-data-dir",
    "gateway --engine http://127.0.0.1:1 --coserve-data-dir data": "COSERVE_ENGINE_ADMIN_KEY",
    f"{GATEWAY} --coserve-data-dir data --engine-dns https://name:1": "http://NAME:PORT",
    "gateway --coserve-data-dir data --router name": "http://HOST:PORT",
    f"{GATEWAY} --coserve-data-dir data --host 192.0.2.1": "choose another --host or --port",
    f"{GATEWAY} --coserve-data-dir good.jsonl": "name another --coserve-data-dir",
    f"{GATEWAY} --coserve-data-dir data --port 99999": "1 to 65535",
    f"{GATEWAY} --coserve-data-dir data --port 30000ms": "without a unit",
    f"{GATEWAY} --coserve-data-dir data --engin http://127.0.0.1:2": "did you mean --engine?",
    f"{GATEWAY} --config missing.yaml": "cannot be read: No such file",
    "gateway --engine 127.0.0.1:1 --coserve-data-dir data --engine-admin-key k": "http://HOST:PORT",
}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistakes")
    (directory / "folder").mkdir()
    (directory / "full").mkdir()
    (directory / "full" / "report.json").symlink_to("/dev/full")
    (directory / "good.jsonl").write_text(LINE)
    (directory / "utf16.jsonl").write_bytes(LINE.encode("utf-16"))
    (directory / "columns.csv").write_text("a,b\n1,2\n")
    (directory / "negative.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,-5,3\n"
    )
    return directory


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_told_in_few_lines(
    command: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    code, _, errors = coserve(*shlex.split(command))
    assert code == (3 if "--retry-for 1 " in command else 2), errors
    assert MISTAKES[command] in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in errors
    assert "Errno" not in errors
    lines = [line for line in errors.splitlines() if "WARNING" not in line]
    assert len(lines) <= (MAX_LINES_OF_PARSER if errors.startswith("Usage:") else MAX_LINES)
