"""The source files of one version of SGLang, read but never imported.

What a wheel holds can be looked up without its dependencies, of which SGLang has many, and
beside the version that is installed (``scripts/seams``).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PACKAGE = "sglang"
_MOST_IMPORTS = 8
"""How many modules a name may be handed on by; more is a circle."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Definition:
    """Where a name is bound."""

    module: str
    node: ast.AST | None
    """A definition, an assignment; a module; None for what SGLang imports from elsewhere."""


class SourceTree:
    """Finds definitions by dotted names. Parses a file when it is first asked for."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        """``read`` returns the text of a path such as ``sglang/srt/x.py``; None if it is absent."""
        self._read = read
        self._modules: dict[str, tuple[ast.Module, bool] | None] = {}
        self._bindings: dict[str, dict[str, ast.AST]] = {}

    @classmethod
    def installed(cls) -> Self:
        """Return the sources of the installed SGLang, which must not be missing."""
        spec = importlib.util.find_spec(_PACKAGE)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent.parent

        def read(name: str) -> str | None:
            path = root / name
            return path.read_text(encoding="utf-8") if path.is_file() else None

        return cls(read)

    def find(self, dotted: str) -> Definition | None:
        """Return where ``dotted``, a module, class, function, method or attribute, is defined.

        Attributes that methods assign to ``self`` count as the class's, and so do inherited ones.
        """
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            tree = self._module(module)
            if tree is not None:
                found: Definition | None = Definition(module, tree)
                for name in parts[end:]:
                    found = self._attribute(found, name) if found is not None else None
                return found
        return None

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            text, is_package = self._read(f"{path}.py"), False
            if text is None:
                text, is_package = self._read(f"{path}/__init__.py"), True
            self._modules[name] = None if text is None else (ast.parse(text), is_package)
        entry = self._modules[name]
        return None if entry is None else entry[0]

    def _attribute(self, owner: Definition, name: str, depth: int = 0) -> Definition | None:
        if isinstance(owner.node, ast.Module):
            return self._global(owner.module, name, depth)
        if isinstance(owner.node, ast.ClassDef):
            return self._member(owner, name, depth)
        return None

    def _global(self, module: str, name: str, depth: int) -> Definition | None:
        """Return what ``name`` is in a module, followed to where it is defined."""
        if depth > _MOST_IMPORTS:
            return None
        tree = self._module(module)
        if tree is None:
            return None
        if module not in self._bindings:
            self._bindings[module] = _bindings(tree.body)
        node = self._bindings[module].get(name)
        if node is None:
            for star in _stars(tree.body):
                found = self._global(self._absolute(module, star), name, depth + 1)
                if found is not None:
                    return found
            submodule = f"{module}.{name}"
            inner = self._module(submodule)
            return None if inner is None else Definition(submodule, inner)
        if isinstance(node, ast.ImportFrom):
            return self._imported(module, node, name, depth)
        if isinstance(node, ast.Import):
            return Definition(module, None)
        return Definition(module, node)

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, depth: int
    ) -> Definition | None:
        source = self._absolute(module, node)
        if not (source == _PACKAGE or source.startswith(_PACKAGE + ".")):
            return Definition(source, None)
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return self._global(source, original, depth + 1)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module that an import names, written out."""
        if not node.level:
            return node.module or ""
        entry = self._modules[module]
        assert entry is not None
        package = module if entry[1] else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package

    def _member(self, owner: Definition, name: str, depth: int) -> Definition | None:
        """Return what ``name`` is in a class or in those it inherits from."""
        assert isinstance(owner.node, ast.ClassDef)
        node = _bindings(owner.node.body).get(name) or _assigned_to_self(owner.node, name)
        if node is not None:
            return Definition(owner.module, node)
        for base in owner.node.bases:
            parent: Definition | None = None
            for part in ast.unparse(base).split("[")[0].split("."):
                parent = (
                    self._global(owner.module, part, depth)
                    if parent is None
                    else self._attribute(parent, part, depth)
                )
                if parent is None:
                    break
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                found = self._member(parent, name, depth + 1)
                if found is not None:
                    return found
        return None


def _bindings(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Return what names are bound to: a definition, where there is one, or else the last of it.

    Decorators written as assignments (``Args = decorated(Args)``) hide no definition.
    """
    found: dict[str, ast.AST] = {}
    for name, node in _bound(body):
        if isinstance(node, _DEFINITIONS) or not isinstance(found.get(name), _DEFINITIONS):
            found[name] = node
    return found


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that statements bind, in order, also under conditions."""
    for node in body:
        if isinstance(node, _DEFINITIONS):
            yield node.name, node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname or alias.name.split(".")[0]), node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name), node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, node
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, name, None) or [])
            for handler in getattr(node, "handlers", ()):
                # What runs when an import fails must not hide what it is a stand-in for.
                names = dict(_bound(node.body)) if isinstance(node, ast.Try) else {}
                yield from ((k, v) for k, v in _bound(handler.body) if k not in names)


def _stars(body: list[ast.stmt]) -> Iterator[ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield node


def _assigned_to_self(owner: ast.ClassDef, name: str) -> ast.AST | None:
    """Return a statement in a method that assigns to ``self.name``."""
    for method in owner.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(method):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                targets = [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if (
                        isinstance(part, ast.Attribute)
                        and part.attr == name
                        and isinstance(part.value, ast.Name)
                        and part.value.id == "self"
                    ):
                        return node
    return None
