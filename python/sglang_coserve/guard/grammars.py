"""Keeps grammars from taking the memory and time of the engine: how large they are, how many stay.

SGLang answers a grammar that XGrammar refuses with a 400. XGrammar compiles any other in a thread,
the longer the deeper it is nested. SGLang's scheduler keeps every compiled grammar until its cache
is flushed, and XGrammar caches their parts: clients that send a new schema with each request would
exhaust the memory.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Final

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.replacements import replace

_GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
_JSON: Final = ("json_schema", "structural_tag")

_MOST_CHARS: Final = 1 << 18
_MOST_NESTED: Final = 200
"""Brackets within brackets. A schema of 150 objects within each other, which are 300, compiles in
0.7 s, one of 400 in more than 6 s (XGrammar 0.2.8 on an AMD EPYC)."""


def check_grammars(params: Mapping[str, Any]) -> None:
    """Check the size of the grammars among SGLang's sampling parameters. O(characters).

    Raises:
        RequestError: one is too large.
    """
    for name in _GRAMMARS:
        text = params.get(name)
        if not isinstance(text, str):
            continue  # SGLang says what is wrong with it.
        if len(text) > _MOST_CHARS:
            raise RequestError(f"{name} has {len(text)} characters: use at most {_MOST_CHARS}")
        if name in _JSON and _nesting(text) > _MOST_NESTED:
            raise RequestError(f"{name} is nested deeper than {_MOST_NESTED} brackets")


def _nesting(text: str) -> int:
    brackets = re.sub(r"[^][{}]+", "", text)
    return max(accumulate(1 if each in "[{" else -1 for each in brackets), default=0)


_MOST_GRAMMARS: Final = 1024
_MOST_BYTES: Final = 256 << 20
"""Compiled for a large vocabulary, a schema takes up to a few megabytes. One that is dropped is
compiled again when needed, in tens of milliseconds outside of the scheduler's thread."""


class GrammarCache(OrderedDict[tuple[str, str], Any]):
    """An LRU cache of grammars by kind and text, bounded in number and bytes."""

    def __init__(self, most: int = _MOST_GRAMMARS, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__()
        self._most = most
        self._most_bytes = most_bytes
        self._num_bytes = 0

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """Return the grammar of ``key`` and mark it as most recently used."""
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: tuple[str, str], value: Any) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, value)
        self._num_bytes += _num_bytes(value)
        while len(self) > self._most or (self._num_bytes > self._most_bytes and len(self) > 1):
            del self[next(iter(self))]

    def __delitem__(self, key: tuple[str, str]) -> None:
        self._num_bytes -= _num_bytes(self[key])
        super().__delitem__(key)

    def clear(self) -> None:
        """Remove all entries."""
        super().clear()
        self._num_bytes = 0


def install_compiler_bound() -> None:
    """Bound the cache of XGrammar's compiler in this process."""
    from sglang.srt.constrained import xgrammar_backend

    replace(
        "sglang.srt.constrained.xgrammar_backend.GrammarCompiler",
        partial(xgrammar_backend.GrammarCompiler, cache_limit_bytes=_MOST_BYTES),
    )


def _num_bytes(grammar: Any) -> int:
    """Return the size of a compiled grammar; 0 if unknown."""
    inner = getattr(grammar, "grammar", grammar)  # Reasoning models wrap it.
    return int(getattr(getattr(inner, "ctx", None), "memory_size_bytes", 0))
