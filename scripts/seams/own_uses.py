"""Finds in our sources what they override, replace, assign and use of SGLang's private names.

``seams`` has an entry for each; tests compare the two. Nothing is imported: classes are followed
through our imports to SGLang's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

_OWN: Final = "sglang_coserve."
Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_FEW_LEVELS: Final = 8
"""Own classes between a class and SGLang's, or names handed on; more is a circle."""

_FUNCTION: Final = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
_PRIVATE: Final = re.compile(
    r"^ *(?:(?:async )?def |class |self\.|)(_[a-z]\w*)(?:\(|:| =)", re.MULTILINE
)


def defined_in(package: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of functions, and the private names, that a package's files define."""
    functions, private = set[str](), set[str]()
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        functions.update(_FUNCTION.findall(text))
        private.update(_PRIVATE.findall(text))
    return frozenset(functions), frozenset(private)


@dataclass(frozen=True, slots=True)
class Use:
    """A name of SGLang that a file of ours overrides, replaces, assigns or uses."""

    name: str
    """Dotted from ``sglang`` on where the owner is known; else the last part alone."""

    where: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass
class OwnFile:
    """A file of ours, and what its names stand for."""

    path: Path
    root: Path
    """The folder from which modules are named; in the checkout's first level."""

    imports: dict[str, str] = field(default_factory=dict)
    """Dotted, by the name in this file."""

    def __post_init__(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its syntax."""
        return list(ast.walk(ast.parse(self.path.read_text(encoding="utf-8"))))

    @property
    def module(self) -> str:
        """Its dotted name."""
        return ".".join(self.path.relative_to(self.root).with_suffix("").parts)

    def at(self, node: ast.AST) -> str:
        """Return the place of a node: the path in the checkout, and the line."""
        return f"{self.path.relative_to(self.root.parent)}:{getattr(node, 'lineno', 0)}"


class OwnUses:
    """What files of ours use of SGLang. Reads each file once: O(their size)."""

    def __init__(self, paths: Iterable[Path], root: Path) -> None:
        self._files = {file.module: file for file in (OwnFile(path, root) for path in paths)}

    def places(self, name: str, *, is_ours: bool = False) -> list[str]:
        """Return where a name of SGLang, dotted, is used.

        Args:
            name: The name.
            is_ours: Whether a function or value of ours takes the place of SGLang's. If so, these
                are the places of ours; else of all that has the last part of the name, be it an
                attribute of another object.
        """
        owner, _, last = name.rpartition(".")
        if last == "__init__":  # All classes have one; a class is called by its name.
            return self.places(owner)
        if is_ours:
            return self._own.get(name) or self._assigned.get(last, [])
        ends = (place for end, place in self._ends if last.endswith(end))
        places = [*self._imported.get(name, ()), *self._mentioned.get(last, ()), *ends]
        return list(dict.fromkeys(places))

    def methods(self) -> Iterator[tuple[Use, Function]]:
        """Yield the members of SGLang's classes that our subclasses define, with our functions."""
        for file, node in self.nodes():
            if isinstance(node, ast.ClassDef):
                for base in self._bases(file, node):
                    for member in node.body:
                        if isinstance(member, _FUNCTIONS) and member.name != "__init__":
                            yield Use(f"{base}.{member.name}", file.at(member)), member

    def overridden(self) -> Iterator[Use]:
        """Yield the members of SGLang's classes that our subclasses define, or that are assigned
        to the classes."""
        yield from (use for use, _ in self.methods())
        for file, node in self.nodes():
            for target in _assigned(node):
                owner = isinstance(target.value, ast.Name) and file.imports.get(target.value.id)
                if owner and owner.startswith("sglang."):
                    yield Use(f"{owner}.{target.attr}", file.at(target))

    def replaced(self) -> Iterator[Use]:
        """Yield the names of SGLang's modules that get another value."""
        for file, node in self.nodes():
            if isinstance(node, ast.Call) and node.args and _called(node) == "replace":
                for name in _texts(file, node.args[0]):
                    if name.startswith("sglang."):
                        yield Use(name, file.at(node))

    def assigned(self) -> Iterator[Use]:
        """Yield the attributes, by their last names, that are assigned to objects of others."""
        for file, node in self.nodes():
            for target in _assigned(node):
                if not _is_own(target.value):
                    yield Use(target.attr, file.at(target))
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "self.__dict__":
                yield from (Use(name, file.at(node)) for name in _texts(file, node.slice))

    def set_by_name(self) -> Iterator[Use]:
        """Yield the texts in files that set attributes by variable names: some are these names."""
        for file in self._files.values():
            calls = (node for node in file.nodes if isinstance(node, ast.Call))
            names = [node.args[1] for node in calls if _called(node) == "setattr"]
            # An own attribute's name is a constant.
            if any(isinstance(name, ast.Name) and name.id.islower() for name in names):
                for node in file.nodes:
                    if isinstance(node, ast.Constant) and str(node.value).isidentifier():
                        yield Use(str(node.value), file.at(node))

    def private(self) -> Iterator[Use]:
        """Yield the private names that are imported, or used of an object that is not our own.

        Of ``self`` in a subclass of SGLang's, a name that the class does not define is SGLang's.
        """
        for file, node in self.nodes():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                for alias in filter(lambda alias: _is_private(alias.name), node.names):
                    yield Use(f"{node.module}.{alias.name}", file.at(node))
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                if not _is_own(node.value):
                    yield Use(node.attr, file.at(node))
            elif isinstance(node, ast.ClassDef) and any(self._bases(file, node)):
                within = list(ast.walk(node))
                own = {target.attr for each in within for target in _assigned(each)}
                own |= {each.name for each in within if isinstance(each, _FUNCTIONS)}
                own |= {each.id for each in within if isinstance(each, ast.Name)}
                uses = (each for each in within if isinstance(each, ast.Attribute))
                for each in (each for each in uses if _is_own(each.value)):
                    if _is_private(each.attr) and each.attr not in own:
                        yield Use(each.attr, file.at(each))

    def public(self, owners: Mapping[str, str]) -> Iterator[Use]:
        """Yield the public attributes of SGLang's objects, as far as their classes are known.

        They are known of ``self`` in our subclasses, and of objects whose name is one of
        ``owners``: the dotted classes by names of ours, such as ``req`` or ``self._scheduler``.
        """
        for file, node in self.nodes():
            if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
                owner = owners.get(ast.unparse(node.value).removeprefix("self."))
                if owner is not None:
                    yield Use(f"{owner}.{node.attr}", file.at(node))
            elif isinstance(node, ast.ClassDef):
                within = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
                own = [each for each in within if _is_own(each.value) and each.attr[0] != "_"]
                for base in self._bases(file, node):
                    yield from (Use(f"{base}.{each.attr}", file.at(each)) for each in own)

    def imported(self) -> Iterator[Use]:
        """Yield what is imported from SGLang."""
        for file, node in self.nodes():
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("sglang."):
                for alias in node.names:
                    yield Use(f"{node.module}.{alias.name}", file.at(node))

    def mentions(self, name: str) -> bool:
        """Return whether a name occurs, be it as a text or as the end of one that is made."""
        return name in self._words or any(name.endswith(end) for end, _ in self._ends)

    @cached_property
    def _words(self) -> frozenset[str]:
        found: set[str] = set()
        for _, node in self.nodes():
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.keyword):
                found.add(node.arg or "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"\w+", node.value))
        return frozenset(found)

    @cached_property
    def _ends(self) -> list[tuple[str, str]]:
        """The ends of texts that are made, each with its place."""
        found = []
        for file, node in self.nodes():
            end = node.values[-1] if isinstance(node, ast.JoinedStr) and node.values else None
            if isinstance(end, ast.Constant) and re.fullmatch(r"_\w+", str(end.value)):
                found.append((str(end.value), file.at(end)))
        return found

    @cached_property
    def _own(self) -> dict[str, list[str]]:
        """Places by dotted names: of our methods, and of values for names of modules."""
        return _by_name((use.name, use.where) for use in (*self.overridden(), *self.replaced()))

    @cached_property
    def _assigned(self) -> dict[str, list[str]]:
        """Places by last names: of assignments to attributes of others."""
        return _by_name((use.last, use.where) for use in (*self.assigned(), *self.set_by_name()))

    @cached_property
    def _imported(self) -> dict[str, list[str]]:
        return _by_name((use.name, use.where) for use in self.imported())

    @cached_property
    def _mentioned(self) -> dict[str, list[str]]:
        """Places by names: of attributes, keywords, and texts that are a name."""
        return _by_name(self._mentions())

    def _mentions(self) -> Iterator[tuple[str, str]]:
        for file in self._files.values():
            classes = (node for node in file.nodes if isinstance(node, ast.ClassDef))
            of_sglang = (node for node in classes if any(self._bases(file, node)))
            inside = {id(each) for node in of_sglang for each in ast.walk(node)}
            for node in file.nodes:
                if isinstance(node, ast.Attribute):
                    # An attribute of ``self`` is SGLang's only in a subclass of SGLang's.
                    is_ours = _is_own(node.value) and id(node) not in inside
                    if not is_ours and ast.unparse(node.value) != "compat":
                        yield node.attr, file.at(node)
                elif isinstance(node, ast.keyword):
                    yield node.arg or "", file.at(node)
                elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
                    yield str(node.value).rpartition(".")[2], file.at(node)

    def nodes(self) -> Iterator[tuple[OwnFile, ast.AST]]:
        """Yield the syntax of all files."""
        for file in self._files.values():
            for node in file.nodes:
                yield file, node

    def _bases(self, file: OwnFile, node: ast.ClassDef, depth: int = 0) -> Iterator[str]:
        """Yield SGLang's classes that a class of ours inherits from, dotted."""
        for base in node.bases:
            yield from self._classes(file, ast.unparse(base).split("[")[0], depth)

    def _classes(self, file: OwnFile, name: str, depth: int) -> Iterator[str]:
        """Yield SGLang's classes that a name in a file stands for, or is made from."""
        if depth > _FEW_LEVELS:
            return
        dotted = file.imports.get(name, "")
        if dotted.startswith("sglang."):
            yield dotted
        elif dotted.startswith(_OWN):
            module, _, own = dotted.rpartition(".")
            if module in self._files:
                yield from self._classes(self._files[module], own, depth + 1)
        for node in file.nodes:
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from self._bases(file, node, depth + 1)
            elif isinstance(node, ast.arg) and node.arg == name and node.annotation is not None:
                for part in re.findall(r"type\[(\w+)\]", ast.unparse(node.annotation)):
                    yield from self._classes(file, part, depth + 1)
            elif (value := _value_of(node, name)) is not None and isinstance(value, ast.Call):
                for made_from in value.args:
                    yield from self._classes(file, ast.unparse(made_from), depth + 1)


def _by_name(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for name, place in found:
        places.setdefault(name, []).append(place)
    return places


def _assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement assigns."""
    targets = list(getattr(node, "targets", ())) if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value):
        targets = [node.target]
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Attribute):
                yield part


def _value_of(node: ast.AST, name: str) -> ast.expr | None:
    """Return what a statement assigns to a name; None if it does not."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return None
    return node.value if name in map(ast.unparse, targets) else None


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _texts(file: OwnFile, node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression may be: of constants, and of names in the same file."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.Name):
        for each in file.nodes:
            if (value := _value_of(each, node.id)) is not None:
                yield from _texts(file, value)
            elif isinstance(each, ast.For) and isinstance(each.iter, ast.Tuple):
                for item in each.iter.elts:
                    if ast.unparse(each.target) == node.id:
                        yield from _texts(file, item)
                    elif ast.unparse(each.target).startswith(f"({node.id}, "):
                        assert isinstance(item, ast.Tuple)
                        yield from _texts(file, item.elts[0])
    elif isinstance(node, ast.JoinedStr):
        yield from _joined(file, node.values)


def _joined(file: OwnFile, parts: list[ast.expr]) -> Iterator[str]:
    if not parts:
        yield ""
        return
    first = parts[0].value if isinstance(parts[0], ast.FormattedValue) else parts[0]
    for begin in _texts(file, first):
        for rest in _joined(file, parts[1:]):
            yield begin + rest
