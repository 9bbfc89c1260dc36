"""Looks up what co-serving relies on in the sources of a version of SGLang.

That is what ``seams`` lists, and whatever ``srt/`` and ``guard/`` import from SGLang, which is
found in its sources. Nothing of SGLang is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import sglang_coserve
from seams import NameUse, Seam, seams_of
from sglang_coserve.srt.compat.versions import module_for
from source_tree import Definition, SourceTree

_ROOT: Final = Path(sglang_coserve.__file__).parent

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def problems(tree: SourceTree, version: str) -> list[str]:
    """Return what ``version``, whose sources ``tree`` holds, lacks or has with other parameters.

    One line each. Reads each file once: O(size of 80 files).
    """
    found = [
        f"{name}: not there, imported by {where}"
        for name, where in imported_names(version)
        if tree.find(name) is None
    ]
    for seam in seams_of(version):
        definition = tree.find(seam.name)
        if definition is None:
            found.append(f"{seam.name}: not there, {seam.use} for: {seam.reason.title}")
        elif (fault := _fault(seam, definition)) is not None:
            found.append(f"{seam.name}: {fault}, {seam.use} for: {seam.reason.title}")
    return found + _unknown_keywords(tree, version)


def imported_names(version: str) -> Iterator[tuple[str, str]]:
    """Yield what we import from SGLang of ``version``, dotted, and which file does."""
    for node, where in _own_nodes(version):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            for alias in node.names:
                yield f"{node.module}.{alias.name}", where


def _unknown_keywords(tree: SourceTree, version: str) -> list[str]:
    """Return calls of listed functions, by their names alone, with keywords they do not take."""
    taken: dict[str, set[str]] = {}
    for seam in seams_of(version):
        definition = tree.find(seam.name) if seam.use is NameUse.CALLED else None
        name = seam.name.rpartition(".")[2]
        if name == "__init__":  # Any class has one.
            continue
        if definition is not None and isinstance(definition.node, _Function):
            taken.setdefault(name, set()).update(parameters_of(definition.node)[0])
            if definition.node.args.kwarg is not None:
                taken[name].add("**")
    found = []
    for node, where in _own_nodes(version):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in taken and "**" not in taken[name]:
            unknown = {word.arg for word in node.keywords if word.arg} - taken[name]
            if unknown:
                found.append(f"{name}: takes no {sorted(unknown)}, called by {where}")
    return found


def _own_nodes(version: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the syntax of what ``version`` uses of ours, and of which file it is."""
    for path in files_for(version):
        where = str(path.relative_to(_ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield node, where


def files_for(version: str) -> list[Path]:
    """Return our files that run with a version: ``own_files`` without the modules of others."""
    modules = set((_ROOT / "srt" / "compat").glob("v[0-9]*.py"))
    used = f"{module_for(version)}.py"
    return [path for path in own_files() if path not in modules or path.name == used]


def own_files() -> list[Path]:
    """Return the files of the packages that import SGLang."""
    return [path for room in ("guard", "srt") for path in sorted((_ROOT / room).rglob("*.py"))]


def _fault(seam: Seam, definition: Definition) -> str | None:
    """Return how a definition differs from what is relied on; None if it does not."""
    node = definition.node
    if seam.parameters is None or not isinstance(node, _Function):
        return None
    names, required = parameters_of(node)
    expected = list(seam.parameters)
    if names[: len(expected)] != expected:
        return f"has parameters {names}, expected {expected} first"
    if seam.passes_rest:
        return None
    if further := [name for name in required if name not in expected]:
        return f"needs also {further}"
    # An optional one breaks our function, too, as soon as SGLang passes it.
    further = [name for name in names if name not in expected] if seam.is_ours else []
    return f"has also {further}, which our function does not pass on" if further else None


def parameters_of(node: _Function) -> tuple[list[str], list[str]]:
    """Return the names of all parameters but ``self``, and of those without a default."""
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [argument.arg for argument, default in only if default is None]
    names = [*positional, *(argument.arg for argument in arguments.kwonlyargs)]
    own = names[:1] if names[:1] in (["self"], ["cls"]) else []
    return names[len(own) :], [name for name in required if name not in own]
