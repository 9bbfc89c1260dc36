"""Where the library may depend on the version of SGLang: in ``srt/compat`` and ``guard/compat``."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import sglang_coserve
from seam_check import own_files
from seams import SEAMS, seams_of
from sglang_coserve.srt.compat.versions import SUPPORTED

LIBRARY = Path(sglang_coserve.__file__).parent
PLACES: Final = ("srt/compat/", "guard/compat.py")

MEASURED_WITH: Final = "core/latency_model/roofline.py"
"""Says with which version figures were measured."""

OF_SOME_KINDS: Final = frozenset(
    [
        # Of requests, messages and results, which have several kinds.
        *("background", "batch", "chat_template", "completion_tokens", "copy_done", "created_time"),
        *("custom_logit_processor", "input_embeds", "logits_output", "offset", "return_logprob"),
        *("sampling_params", "session_params", "time_stats", "token_ids_logprob"),
        "top_logprobs_num",
        # Of attention backends, graph runners, parsers, grammars, tokenizers and handlers.
        *("_buffer", "attn_backend_list", "backend", "capture_bs", "ctx", "decode_backend"),
        *("detector", "grammar", "init_xgrammar", "memory_size_bytes", "ollama_serving"),
        # Of Python, torch, Starlette, FastAPI and Uvicorn.
        *("__module__", "__self__", "_torchdynamo_orig_callable", "body_params", "dependant"),
        *("endpoint", "methods", "original_router", "path", "receive", "scope", "should_exit"),
        *("url", "weight_loader"),
        # Ours.
        *("_coserve", "checkpoint_step", "is_before_keys", "prefill_launch_s", "stream"),
    ]
)
"""Attributes that some objects lack with every version of SGLang."""


def elsewhere() -> list[Path]:
    """Return the files of the library outside of ``PLACES``."""
    files = sorted(LIBRARY.rglob("*.py"))
    return [path for path in files if not inside(path).startswith(PLACES)]


def using_sglang() -> list[Path]:
    """Return those of the packages that import SGLang."""
    return [path for path in own_files() if not inside(path).startswith(PLACES)]


def inside(path: Path) -> str:
    return path.relative_to(LIBRARY).as_posix()


def missing_somewhere() -> set[str]:
    """Return the dotted names of the register that a supported version lacks."""
    having = Counter(
        name for version in SUPPORTED for name in {seam.name for seam in seams_of(version)}
    )
    return {name for name, count in having.items() if count < len(SUPPORTED)}


def names_of_some_versions() -> set[str]:
    """Return the names of methods, of private members and of what is replaced that the register
    has for some versions only. A public name that is read or called may be another owner's, too."""
    missing = missing_somewhere()
    named = [(seam.name.rpartition(".")[2], seam) for seam in SEAMS]
    chosen = [(name, seam) for name, seam in named if seam.is_ours or name.startswith("_")]
    found = {name for name, seam in chosen if seam.name in missing}
    return {
        name
        for name in found - {name for name, seam in named if seam.name not in missing}
        if not name.startswith("__")
    }


def mentioned(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names and texts of a file, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.alias):
            yield node.name, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2], node.lineno


def names_with_defaults(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the attributes, each with its line, that a file uses only where an object has them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        is_optional = (node.func.id, len(node.args)) in (("getattr", 3), ("hasattr", 2))
        if is_optional and isinstance(node.args[1], ast.Constant):
            yield str(node.args[1].value), node.lineno


def parsed(paths: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    for path in paths:
        yield inside(path), ast.parse(path.read_text(encoding="utf-8"))


VERSION: Final = re.compile(r"\b0\.5\.\d+|\bSGLang v?\d", re.IGNORECASE)


def test_no_version_of_sglang_is_named_elsewhere() -> None:
    """In code or comments."""
    found = [
        f"{inside(path)}:{number}: {line.strip()}"
        for path in elsewhere()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if VERSION.search(line) and inside(path) != MEASURED_WITH
    ]
    assert found == [], "ask in srt/compat (in the guard: guard/compat.py)"


def test_versions_are_compared_nowhere_else() -> None:
    modules = {path.stem for path in (LIBRARY / "srt/compat").glob("v[0-9]*.py")}
    assert {"v17", "v23"} <= modules
    names = {"packaging", "packaging.version", "module_for", "version_key", *modules}
    found = []
    for name, tree in parsed(elsewhere()):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = {getattr(node, "module", None), *(each.name for each in node.names)}
                found += [f"{name}:{node.lineno}: {each}" for each in imported & names]
    assert found == []


def test_names_of_some_versions_are_used_nowhere_else() -> None:
    names = names_of_some_versions() - {"finish"}  # Methods of ours have that name, too.
    assert {"can_schedule_lora_req", "_can_schedule_lora_req", "alloc_decode_kernel"} <= names
    found = [
        f"{file}:{line}: {name}"
        for file, tree in parsed(using_sglang())
        for name, line in mentioned(tree)
        if name in names
    ]
    assert found == [], "give it one name for all versions in srt/compat"


def test_a_missing_attribute_is_no_difference_between_versions() -> None:
    """Elsewhere a default stands only for an attribute that some kinds of objects lack."""
    asked = [
        (name, f"{file}:{line}: {name}")
        for file, tree in parsed(using_sglang())
        for name, line in names_with_defaults(tree)
    ]
    assert [where for name, where in asked if name not in OF_SOME_KINDS] == []
    assert OF_SOME_KINDS - {name for name, _ in asked} == set(), "no file asks for these any more"
    some_versions = {name.rpartition(".")[2] for name in missing_somewhere()}
    assert OF_SOME_KINDS & some_versions == set()


@pytest.mark.parametrize(
    ("source", "finds"),
    [
        ("x = 1  # Since 0.5.22.", True),
        ('"""Has it since SGLang 0.6."""', True),
        ("x = 0.5", False),
        ("x = y[0.5:1]  # Before SGLang reads it.", False),
    ],
)
def test_versions_are_found(source: str, finds: bool) -> None:
    assert bool(VERSION.search(source)) == finds


def test_names_are_found() -> None:
    tree = ast.parse('getattr(a, "b", 1); hasattr(c, "d"); getattr(e, "f"); getattr(g, h, 1)')
    assert [name for name, _ in names_with_defaults(tree)] == ["b", "d"]
    tree = ast.parse('from a import b\ndef c(): return d.e\nreplace("f.g", 1)')
    assert {name for name, _ in mentioned(tree)} == {"b", "c", "e", "g"}
