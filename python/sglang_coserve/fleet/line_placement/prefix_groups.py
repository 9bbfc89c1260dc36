"""Which lines share so much of their prompts that one engine is to have them."""

from __future__ import annotations

from sglang_coserve.jsonl.request_line import KEY_BLOCK_BYTES


class PrefixGroups:
    """Unfinished lines, as a trie of their prefix keys (``jsonl.prefix_key``).

    A group is the largest subtree that one engine can have at a time. If more lines than that share
    a beginning, the lines that share more of it are a group. A subtree that is divided between n
    engines is computed n times, so a subtree that fits stays whole.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def join(self, key: bytes, most_lines: int) -> bytes:
        """Add a line; return its group, a beginning of ``key``. O(blocks of that)."""
        counts = self._counts
        group = b""
        for end in range(KEY_BLOCK_BYTES, len(key) + 1, KEY_BLOCK_BYTES):
            group = key[:end]
            counts[group] = count = counts.get(group, 0) + 1
            if count <= most_lines:
                break
        return group

    def leave(self, group: bytes) -> None:
        """Remove a line that has joined ``group``."""
        counts = self._counts
        for end in range(KEY_BLOCK_BYTES, len(group) + 1, KEY_BLOCK_BYTES):
            counts[group[:end]] -= 1
            if not counts[group[:end]]:
                del counts[group[:end]]
