"""Looks up what co-serving relies on in the sources of a version of SGLang.

That is what ``seams`` lists, and whatever this package imports from SGLang, which is found in its
own sources. Nothing of SGLang is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sglang_coserve.srt.compat.seams import NameUse, Seam, seams_of
from sglang_coserve.srt.compat.source_tree import Definition, SourceTree
from sglang_coserve.srt.compat.versions import version_key

__all__ = ["changes", "imported_names", "problems", "signature"]

_SRT: Final = Path(__file__).parent.parent
_OWN_VERSION: Final = re.compile(r"v(\d+)")

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
            found.append(f"{seam.name}: not there, {seam.use}")
        elif (fault := _fault(seam, definition)) is not None:
            found.append(f"{seam.name}: {fault}, {seam.use}")
    return found + _unknown_keywords(tree, version)


def changes(old: SourceTree, new: SourceTree, old_version: str, new_version: str) -> list[str]:
    """Return what differs between two versions in what is relied on in either; one line each."""
    names: dict[str, None] = {}
    for version in (old_version, new_version):
        names.update(dict.fromkeys(name for name, _ in imported_names(version)))
        names.update(dict.fromkeys(seam.name for seam in seams_of(version)))
    lines = []
    for name in sorted(names):
        line = _change(old.find(name), new.find(name))
        if line is not None:
            lines.append(f"{name}: {line}")
    return lines


def imported_names(version: str) -> Iterator[tuple[str, str]]:
    """Yield what this package imports from SGLang of ``version``, dotted, and which file does."""
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
            taken.setdefault(name, set()).update(_parameters(definition.node)[0])
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
    """Yield the syntax of this package, as far as ``version`` uses it, and of which file it is."""
    for path in sorted(_SRT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = str(path.relative_to(_SRT.parent))
        own = _OWN_VERSION.fullmatch(path.stem) if path.parent.name == "compat" else None
        nodes = ast.walk(tree) if own is None else _used(tree, int(own.group(1)), version)
        for node in nodes:
            yield node, where


def signature(definition: Definition) -> str | None:
    """Return the parameters of a function as they are written; None of anything else."""
    if not isinstance(definition.node, _Function):
        return None
    return f"({ast.unparse(definition.node.args)})"


def _used(tree: ast.Module, since: int, version: str) -> Iterator[ast.AST]:
    """Yield the nodes of those functions of a file ``vN`` that ``version`` takes from it."""
    patch = version_key(version)[2]
    if since > patch:
        return
    newer = [
        path
        for path in (_SRT / "compat").glob("v*.py")
        if (found := _OWN_VERSION.fullmatch(path.stem)) and since < int(found.group(1)) <= patch
    ]
    replaced = {
        node.name
        for path in newer
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, _Function)
    }
    for node in tree.body:
        if not (isinstance(node, _Function) and node.name in replaced):
            yield from ast.walk(node)


def _fault(seam: Seam, definition: Definition) -> str | None:
    """Return how a definition differs from what is relied on; None if it does not."""
    node = definition.node
    if seam.parameters is None or not isinstance(node, _Function):
        return None
    names, required = _parameters(node)
    expected = list(seam.parameters)
    if names[: len(expected)] != expected:
        return f"has parameters {names}, expected {expected} first"
    further = [name for name in required if name not in expected]
    return f"needs also {further}" if further else None


def _parameters(node: _Function) -> tuple[list[str], list[str]]:
    """Return the names of all parameters but ``self``, and of those without a default."""
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [argument.arg for argument, default in only if default is None]
    names = [*positional, *(argument.arg for argument in arguments.kwonlyargs)]
    own = names[:1] if names[:1] in (["self"], ["cls"]) else []
    return names[len(own) :], [name for name in required if name not in own]


def _change(old: Definition | None, new: Definition | None) -> str | None:
    if old is None or new is None:
        return None if old is new else ("gone" if new is None else "new")
    before, after = signature(old), signature(new)
    if before != after:
        return f"parameters {before} -> {after}"
    if old.module != new.module:
        return f"moved from {old.module} to {new.module}"
    if isinstance(old.node, _Function) and isinstance(new.node, _Function):
        return None if _body(old.node) == _body(new.node) else "body changed"
    return None


def _body(node: _Function) -> str:
    """Return a function's statements in one form, without its docstring."""
    begin = 1 if ast.get_docstring(node) is not None else 0
    return "\n".join(map(ast.unparse, node.body[begin:]))
