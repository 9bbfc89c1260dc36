"""BROS's bidirectional KV blocks against pages that one row owns (BROS §V), as allocators alone.

    python benchmark/bench_kv_layout.py --steps 8000 --out kv_layout.json

Each step every running row generates a token; online rows come in bursts, offline
ones never run out; prompts and outputs are log-normal with the means and deviations
of BROS's Table II. An online row that finds no memory takes it from offline rows,
the one that generated least first:

- ``whole``: all pages of a victim, which computes its KV again;
- ``tail``: the victim's last pages, saved to the host; with pages of one token, its
  last tokens;
- ``bidirectional``: one online and one offline row share a block, the first from the
  left, the second from the right. The overwritten offline tokens are saved.

Printed: unused slots in blocks that are taken (fragmentation), evictions that online
rows forced, tokens copied to the host when everything is copied as it is made (eager)
or only what is about to be lost (lazy), and tokens computed again. One copied token
is ``--token-bytes`` bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ONLINE_LENGTHS: Final = ((222.76, 256.36), (234.51, 268.50))
OFFLINE_LENGTHS: Final = ((784.14, 151.17), (80.96, 28.23))
BURST_STEPS: Final = 1200
ARRIVALS_PER_STEP: Final = (0.02, 0.14)
"""Mean online arrivals outside of a burst and in one."""

MOST_OFFLINE_ROWS: Final = 128
RESERVED_SHARE: Final = 0.02
"""Part of the memory that offline rows leave free when they are admitted or come back."""


@dataclass(eq=False, slots=True)
class Row:
    """One request; ``present_tokens`` of its ``length_tokens`` are on the device."""

    prompt_tokens: int
    output_tokens: int
    number: int
    length_tokens: int = 0
    present_tokens: int = 0
    generated_tokens: int = 0
    saved_from: int = 0
    saved_to: int = 0
    """What the host has of it, of a row whose tail was taken before."""

    blocks: list[Block] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Block:
    """Slots that an online row fills from the left and an offline one from the right."""

    online: Row | None = None
    online_tokens: int = 0
    offline: Row | None = None
    offline_tokens: int = 0


class Layout(ABC):
    """KV memory of ``total_tokens`` in blocks; counts what it costs."""

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        self.num_blocks = total_tokens // block_tokens
        self.num_free = self.num_blocks
        self.block_tokens = block_tokens
        self.counts: Counter[str] = Counter()

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    @abstractmethod
    def add(self, row: Row, tokens: int, offline: list[Row] | None) -> bool:
        """Give a row slots for more tokens; ``offline`` are the victims if it is online."""

    @abstractmethod
    def remove(self, row: Row) -> None:
        """Take all slots of a row back."""

    def restore(self, row: Row) -> bool:
        """Bring back what is missing of an offline row."""
        missing = row.length_tokens - row.present_tokens
        if not self.add(row, missing, None):
            return False
        row.length_tokens -= missing
        return True


class Paged(Layout):
    """Pages with one owner; victims lose their last pages, or all."""

    def __init__(self, total_tokens: int, block_tokens: int, *, whole: bool) -> None:
        super().__init__(total_tokens, block_tokens)
        self._whole = whole

    def add(self, row: Row, tokens: int, offline: list[Row] | None) -> bool:
        """Take free pages, then those of victims."""
        need = self.blocks_for(row.present_tokens + tokens) - self.blocks_for(row.present_tokens)
        if offline is not None:
            for victim in sorted(offline, key=lambda row: (row.generated_tokens, -row.number)):
                if need <= self.num_free:
                    break
                if victim.present_tokens:
                    self._evict(victim, need - self.num_free)
        if need > self.num_free:
            return False
        self.num_free -= need
        row.present_tokens += tokens
        row.length_tokens += tokens
        return True

    def _evict(self, victim: Row, pages: int) -> None:
        held = self.blocks_for(victim.present_tokens)
        pages = held if self._whole else min(pages, held)
        self.num_free += pages
        self.counts["forced"] += 1
        left = min(victim.present_tokens, (held - pages) * self.block_tokens)
        if self._whole:
            self.counts["recomputed"] += victim.length_tokens
        else:
            lost = victim.present_tokens - left
            saved = max(0, victim.saved_to - max(left, victim.saved_from))
            self.counts["lazy"] += lost - min(saved, lost)
            victim.saved_from = min(left, victim.saved_from) if victim.saved_to else left
            victim.saved_to = max(victim.saved_to, victim.present_tokens)
        victim.present_tokens = left

    def remove(self, row: Row) -> None:
        """Free its pages."""
        self.num_free += self.blocks_for(row.present_tokens)
        row.present_tokens = 0


class Bidirectional(Layout):
    """Blocks with an owner on either side. Offline rows open free blocks only."""

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        super().__init__(total_tokens, block_tokens)
        self._offline_only: dict[Block, None] = {}  # In the order they were opened.

    def add(self, row: Row, tokens: int, offline: list[Row] | None) -> bool:
        """Fill the row's open block, then free blocks, then the free side of others' blocks."""
        is_online = offline is not None
        size = self.block_tokens
        room = 0
        if row.blocks:
            last = row.blocks[-1]
            used = last.online_tokens if is_online else last.offline_tokens + last.online_tokens
            room = size - used
        more = self.blocks_for(max(tokens - room, 0))
        shared = more - self.num_free
        if shared > (len(self._offline_only) if is_online else 0):
            return False
        row.length_tokens += tokens
        row.present_tokens += tokens
        if room > 0:
            self._fill(row.blocks[-1], min(room, tokens), is_online=is_online)
        left = tokens - min(room, tokens)
        for _ in range(more):
            block = self._open(row, is_online=is_online)
            self._fill(block, min(size, left), is_online=is_online)
            left -= min(size, left)
        return True

    def _open(self, row: Row, *, is_online: bool) -> Block:
        if self.num_free:
            self.num_free -= 1
            block = Block()
        else:
            block = min(self._offline_only, key=lambda block: block.offline_tokens)
            del self._offline_only[block]
            self.counts["forced"] += 1
        if is_online:
            block.online = row
        else:
            block.offline = row
            self._offline_only[block] = None
        row.blocks.append(block)
        return block

    def _fill(self, block: Block, tokens: int, *, is_online: bool) -> None:
        if not is_online:
            block.offline_tokens += tokens
            return
        block.online_tokens += tokens
        overwritten = block.online_tokens + block.offline_tokens - self.block_tokens
        if overwritten <= 0:
            return
        victim = block.offline
        assert victim is not None
        self.counts["lazy"] += overwritten
        block.offline_tokens -= overwritten
        victim.present_tokens -= overwritten
        if not block.offline_tokens:
            block.offline = None
            victim.blocks.remove(block)

    def remove(self, row: Row) -> None:
        """Free its sides, and the blocks that are empty then."""
        for block in row.blocks:
            if block.online is row:
                block.online, block.online_tokens = None, 0
                if block.offline is not None:
                    self._offline_only[block] = None
            else:
                block.offline, block.offline_tokens = None, 0
                self._offline_only.pop(block, None)
            if block.online is None and block.offline is None:
                self.num_free += 1
        row.blocks, row.present_tokens = [], 0


def lognormal(rng: random.Random, mean: float, deviation: float) -> int:
    """Draw a length with this mean and standard deviation."""
    variance = math.log(1 + (deviation / mean) ** 2)
    value = rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return int(min(3000, max(4, value)))


class Engine:
    """Rows on a layout, step by step."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout = layout
        # Apart, so that all layouts get the same online load.
        self._rngs = {
            ONLINE_LENGTHS: random.Random(seed),
            OFFLINE_LENGTHS: random.Random(-1 - seed),
        }
        self._queue: list[Row] = []
        self._online: list[Row] = []
        self._offline: list[Row] = []
        self._num_rows = 0
        self._unused_share = 0.0

    def _new_row(self, lengths: tuple[tuple[float, float], tuple[float, float]]) -> Row:
        self._num_rows += 1
        prompt, output = (lognormal(self._rngs[lengths], *pair) for pair in lengths)
        return Row(prompt, output, self._num_rows)

    def run(self, steps: int) -> dict[str, float]:
        """Return the figures of so many steps."""
        for step in range(steps):
            rate = ARRIVALS_PER_STEP[step // BURST_STEPS % 2]
            while self._rngs[ONLINE_LENGTHS].random() < rate / (1 + rate):
                self._queue.append(self._new_row(ONLINE_LENGTHS))
            self._admit_online()
            self._decode()
            self._admit_offline()
            self._measure()
        counts = self._layout.counts
        names = ("forced", "lazy", "eager", "recomputed", "online_tokens", "offline_tokens")
        return {
            "fragmentation": self._unused_share / steps,
            **{name: counts[name] for name in names},
        }

    def _admit_online(self) -> None:
        while self._queue:
            row = self._queue[0]
            if not self._layout.add(row, row.prompt_tokens, self._offline):
                return
            self._online.append(self._queue.pop(0))

    def _decode(self) -> None:
        layout = self._layout
        for row in list(self._online):
            if layout.add(row, 1, self._offline):
                self._generated(row, self._online, "online_tokens")
        for row in list(self._offline):
            is_whole = row.present_tokens == row.length_tokens
            if is_whole and layout.add(row, 1, None):
                layout.counts["eager"] += 1
                self._generated(row, self._offline, "offline_tokens")

    def _generated(self, row: Row, rows: list[Row], counted: str) -> None:
        row.generated_tokens += 1
        self._layout.counts[counted] += 1
        if row.generated_tokens >= row.output_tokens:
            self._layout.remove(row)
            rows.remove(row)

    def _admit_offline(self) -> None:
        layout = self._layout
        reserve = int(layout.num_blocks * RESERVED_SHARE)
        is_room_left = True
        for row in self._offline:
            missing = row.length_tokens - row.present_tokens
            if missing:
                is_room_left = layout.blocks_for(missing) + 1 <= layout.num_free - reserve
                if not (is_room_left and layout.restore(row)):
                    return
        while is_room_left and len(self._offline) < MOST_OFFLINE_ROWS:
            row = self._new_row(OFFLINE_LENGTHS)
            whole_tokens = row.prompt_tokens + row.output_tokens
            if layout.blocks_for(whole_tokens) > layout.num_free - reserve:
                return
            layout.add(row, row.prompt_tokens, None)
            layout.counts["eager"] += row.prompt_tokens
            self._offline.append(row)

    def _measure(self) -> None:
        layout = self._layout
        taken = (layout.num_blocks - layout.num_free) * layout.block_tokens
        used = sum(row.present_tokens for row in (*self._online, *self._offline))
        self._unused_share += (taken - used) / (layout.num_blocks * layout.block_tokens)


def layouts(total_tokens: int) -> dict[str, Layout]:
    """Return what is compared, by name."""
    made: dict[str, Layout] = {}
    for page in (16, 64):
        made[f"whole, page {page}"] = Paged(total_tokens, page, whole=True)
    for page in (1, 16, 64):
        made[f"tail, page {page}"] = Paged(total_tokens, page, whole=False)
    for page in (16, 64, 128):
        made[f"bidirectional, block {page}"] = Bidirectional(total_tokens, page)
    return made


def main() -> None:
    """Run the experiment and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=24_000, help="KV memory in tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--token-bytes", type=int, default=131_072, help="as of Llama-3.1-8B")
    parser.add_argument("--out", type=Path, metavar="FIGURES.json")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    print(f"{'layout':24} {'frag %':>7} {'forced':>7} {'lazy MB':>8} {'eager MB':>9} ", end="")
    print(f"{'recomputed ktok':>16} {'offline ktok':>13} {'online ktok':>12}")
    for name in layouts(options.slots):
        runs = [
            Engine(layouts(options.slots)[name], seed).run(options.steps) for seed in options.seeds
        ]
        mean = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
        figures[name] = mean
        copied = {key: mean[key] * options.token_bytes / 1e6 for key in ("lazy", "eager")}
        print(
            f"{name:24} {mean['fragmentation'] * 100:7.2f} {mean['forced']:7.0f} "
            f"{copied['lazy']:8.0f} {copied['eager']:9.0f} {mean['recomputed'] / 1e3:16.1f} "
            f"{mean['offline_tokens'] / 1e3:13.1f} {mean['online_tokens'] / 1e3:12.1f}",
            flush=True,
        )
    if options.out is not None:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        options.out.write_text(json.dumps({"settings": settings, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
