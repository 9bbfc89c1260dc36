"""Bounds the memory that compiled grammars take in SGLang's scheduler.

SGLang keeps every compiled grammar until its cache is flushed, and XGrammar caches their
parts: clients that send a new schema with each request would exhaust the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, Final

from sglang_coserve.guard.replacements import replace

__all__ = ["GrammarCache", "install_compiler_bound"]

_MOST_GRAMMARS: Final = 1024
_MOST_BYTES: Final = 256 << 20
"""Compiled for a large vocabulary, a schema takes up to a few megabytes. An retracted one is
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
