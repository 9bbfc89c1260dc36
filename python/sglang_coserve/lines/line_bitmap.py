"""A set of line numbers, one bit each."""

from __future__ import annotations

__all__ = ["LineBitmap"]


class LineBitmap:
    """1-based line numbers; a million of them take 125 kB."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        index = line >> 3
        return index < len(self._bits) and bool(self._bits[index] & (1 << (line & 7)))

    def add(self, line: int) -> bool:
        """Add ``line``; return False if it was present already. Amortized O(1)."""
        if line in self:
            return False
        index = line >> 3
        if index >= len(self._bits):
            self._bits.extend(bytes(index + 1 - len(self._bits)))
        self._bits[index] |= 1 << (line & 7)
        self._count += 1
        return True
