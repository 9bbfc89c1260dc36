"""Looks up what co-serving relies on in the sources of a version of SGLang.

These are the names that ``seams`` lists, and those that our sources import from SGLang. Nothing of
SGLang is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import sglang_coserve
from own_uses import OwnUses, Use
from seams import NameUse, Seam, seams_of
from sglang_coserve.srt.compat.versions import module_for
from source_tree import Definition, SourceTree

_ROOT: Final = Path(sglang_coserve.__file__).parent
_BENCHMARK: Final = Path(__file__).parents[2] / "benchmark"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    """What a version of SGLang breaks, or may break."""

    name: str
    """Dotted; the last part alone of a function that is called with other keywords."""

    says: str

    where: tuple[str, ...] = ()
    """Our uses of the name: paths in the checkout, with lines."""

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.says}", *(f"    {place}" for place in self.where)])


def problems(tree: SourceTree, version: str) -> list[Finding]:
    """Return what ``version``, whose sources ``tree`` holds, lacks or has with other parameters.

    Reads each file once: O(size of 80 files).
    """
    found = [
        Finding(use.name, "not there, imported", (use.where,))
        for use in imports_for(version)
        if tree.find(use.name) is None
    ]
    for seam in seams_of(version):
        definition = tree.find(seam.name)
        fault = "not there" if definition is None else _fault(seam, definition)
        if fault is not None:
            says = f"{fault}, {seam.use} for: {seam.reason.title}"
            found.append(Finding(seam.name, says, places_of(seam, version)))
    return found + _unknown_keywords(tree, version)


def imports_for(version: str) -> Iterator[Use]:
    """Yield what we import from SGLang of ``version``."""
    for uses in uses_for(version):
        yield from uses.imported()


def places_of(seam: Seam, version: str) -> tuple[str, ...]:
    """Return where we use a name with ``version``; nowhere if its behaviour alone matters."""
    if seam.use is NameUse.RELIED:
        return ()
    found = (uses.places(seam.name, is_ours=seam.is_ours) for uses in uses_for(version))
    return tuple(place for places in found for place in places)


def _unknown_keywords(tree: SourceTree, version: str) -> list[Finding]:
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
    for file, node in (each for uses in uses_for(version) for each in uses.nodes()):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in taken and "**" not in taken[name]:
            unknown = {word.arg for word in node.keywords if word.arg} - taken[name]
            if unknown:
                found.append(Finding(name, f"takes no {sorted(unknown)}", (file.at(node),)))
    return found


@cache
def uses_for(version: str) -> tuple[OwnUses, ...]:
    """Return what our library, and what our benchmarks use of SGLang of ``version``."""
    library = OwnUses(files_for(version), _ROOT.parent)
    return library, OwnUses(_benchmark_files(), _BENCHMARK)


def files_for(version: str) -> list[Path]:
    """Return our files that run with a version: ``own_files`` without the modules of others."""
    modules = set((_ROOT / "srt" / "compat").glob("v[0-9]*.py"))
    used = f"{module_for(version)}.py"
    return [path for path in own_files() if path not in modules or path.name == used]


def own_files() -> list[Path]:
    """Return the files of the packages that import SGLang."""
    return [path for room in ("guard", "srt") for path in sorted((_ROOT / room).rglob("*.py"))]


def _benchmark_files() -> list[Path]:
    """Return the files of benchmarks that import SGLang."""
    imports = re.compile(r"^ *from sglang\.", re.MULTILINE)
    paths = sorted(_BENCHMARK.rglob("*.py"))
    return [path for path in paths if imports.search(path.read_text(encoding="utf-8"))]


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
