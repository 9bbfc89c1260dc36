"""Every command in the docs is one that there is, and every snippet is Python that there is."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from srt.documentation.blocks import PAGES, ROOT, Block, blocks_of
from srt.test_documented_flags import (
    FLAG,
    flags_in,
    flags_of_bench_serving,
    flags_of_coserve,
    flags_of_server,
    flags_of_sglang,
    options_of,
)

LANGUAGES = {"sh", "bash", "console", "python", "json", "nginx", "text", "yaml", ""}
OTHERS = {
    ".",
    "cd",
    "curl",
    "docker",
    "export",
    "git",
    "jq",
    "kubectl",
    "openssl",
    "pip",
    "smg",
    "wait",
}
"""Programs that are not ours."""

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.is_shell]
PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """Of each subcommand of ``coserve``, and of modules that are programs."""
    from sglang_coserve.bench_serving.options import SECTIONS, make_parser
    from sglang_coserve.fleet.options import _parser

    found = flags_of_coserve()
    found["serve"] = flags_of_server() | flags_of_sglang()
    found["sglang.launch_server"] = flags_of_sglang()
    found["profile"] |= flags_of_sglang()
    found["gateway"] = options_of(_parser())
    found["sglang_coserve.launch_server"] = found["serve"]
    found["sglang.bench_serving"] = flags_of_bench_serving()
    found["sglang_coserve.bench_serving"] = (
        options_of(make_parser()) | {*SECTIONS} | flags_of_bench_serving() | found["serve"]
    )
    return found


def test_every_block_says_what_it_is() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    assert len(SHELL) > 40 and len(PYTHON) > 8


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_and_their_flags_exist(block: Block, flags: dict[str, set[str]]) -> None:
    commands = list(block.commands())
    assert commands, "a block without a command"
    assert [fault for command in commands for fault in faults_of(command, flags)] == []


def faults_of(words: Sequence[str], flags: dict[str, set[str]]) -> list[str]:
    program, *rest = words
    used = {flag for word in rest for flag in FLAG.findall(word.partition("=")[0]) if flag == word}
    if program in OTHERS:
        return []
    if program == "coserve":
        name = next((name for name in (" ".join(rest[:2]), *rest[:1]) if name in flags), "")
        return [f"coserve {name} {flag}" for flag in used - flags[name]] or (
            [] if name else [f"no command: {words}"]
        )
    if program == "python" and rest[0] == "-m":
        missing = [] if importlib.util.find_spec(rest[1]) else [rest[1]]
        return missing + [f"{rest[1]} {flag}" for flag in used - flags.get(rest[1], set())]
    script = ROOT / (rest[0] if program == "python" else program)
    if not script.is_file():
        return [f"no such program: {words}"]
    # Options of the programs are declared in many ways; those of servers are passed on.
    declared = {
        flag
        for file in (script, *script.parent.rglob("*.py"))
        for flag in re.findall(r"""["'](--[a-z][a-z0-9-]*)["']""", file.read_text())
    }
    return [f"{script.name} {flag}" for flag in used - declared - flags_in(script)]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_snippets_compile_and_import_what_there_is(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_json_is_json(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "json":
            try:
                json.loads(block.text)
            except ValueError:
                [json.loads(line) for line in block.text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_mark_is_understood(page: Path) -> None:
    """A comment that is misspelt marks nothing."""
    text = page.read_text()
    marks = re.findall(r"<!-- *(?:not run|server)\b", text)
    understood = re.findall(r"<!-- (?:not run|not run from here on|server): \S.* -->", text)
    assert len(marks) == len(understood)
    named = re.findall(r"\btest/[\w/.]+", " ".join(understood))
    assert [name for name in named if not (ROOT / name).exists()] == []
