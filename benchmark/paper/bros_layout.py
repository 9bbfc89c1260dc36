"""BROS §V: blocks that two requests share from both ends, against pages with one owner.

Allocators alone. Each step every running request generates a token; online requests come in
bursts, offline ones never run out, lengths as in Table II. An online request that finds no memory
takes it from offline ones, of the one that generated least first: all its pages (*whole*), its
last pages, saved to the host (*tail*), or slot by slot of a block that both then share, the
online one from the left, the offline one from the right (*bidirectional*).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Final

from paper.experiment import Cell, Conditions, Findings
from paper.testbed import Lengths

__all__ = ["compare_layouts"]

ONLINE: Final = Lengths.of_deviation(222.76, 256.36, 234.51, 268.50)
OFFLINE: Final = Lengths.of_deviation(784.14, 151.17, 80.96, 28.23)
KV_TOKENS: Final = 24_000
STEPS_PER_SECOND: Final = 50
BURST_STEPS: Final = 1200
ARRIVALS_PER_STEP: Final = (0.02, 0.14)
"""Mean online arrivals outside of a burst and in one."""

MOST_OFFLINE_ROWS: Final = 128
RESERVED_SHARE: Final = 0.02
"""Part of the memory that offline requests leave free when they are admitted or come back."""

SEEDS: Final = (1, 2, 3)


@dataclass(eq=False, slots=True)
class LayoutRequest:
    """One request; ``present_tokens`` of its ``length_tokens`` are on the device."""

    prompt_tokens: int
    output_tokens: int
    length_tokens: int = 0
    present_tokens: int = 0
    generated_tokens: int = 0
    blocks: list[Block] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Block:
    """Slots that an online request fills from the left and an offline one from the right."""

    online: LayoutRequest | None = None
    online_tokens: int = 0
    offline: LayoutRequest | None = None
    offline_tokens: int = 0


class Layout(ABC):
    """KV memory of ``total_tokens`` in blocks; counts what it costs."""

    def __init__(self, block_tokens: int) -> None:
        self.num_blocks = KV_TOKENS // block_tokens
        self.num_free = self.num_blocks
        self.block_tokens = block_tokens
        self.counts: Counter[str] = Counter()

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    @abstractmethod
    def add(self, request: LayoutRequest, tokens: int, offline: list[LayoutRequest] | None) -> bool:
        """Give a request slots for more tokens; ``offline`` are the victims if it is online."""

    @abstractmethod
    def remove(self, request: LayoutRequest) -> None:
        """Take all slots of a request back."""

    def restore(self, request: LayoutRequest) -> bool:
        """Bring back what is missing of an offline request."""
        missing = request.length_tokens - request.present_tokens
        if not self.add(request, missing, None):
            return False
        request.length_tokens -= missing
        return True


class Paged(Layout):
    """Pages with one owner; victims lose their last pages, or all."""

    def __init__(self, block_tokens: int, *, whole: bool) -> None:
        super().__init__(block_tokens)
        self._whole = whole

    def add(self, request: LayoutRequest, tokens: int, offline: list[LayoutRequest] | None) -> bool:
        """Take free pages, then those of victims."""
        need = self.blocks_for(request.present_tokens + tokens) - self.blocks_for(
            request.present_tokens
        )
        if offline is not None:
            for victim in sorted(offline, key=lambda request: request.generated_tokens):
                if need <= self.num_free:
                    break
                if victim.present_tokens:
                    self._retract(victim, need - self.num_free)
        if need > self.num_free:
            return False
        self.num_free -= need
        request.present_tokens += tokens
        request.length_tokens += tokens
        return True

    def _retract(self, victim: LayoutRequest, pages: int) -> None:
        held = self.blocks_for(victim.present_tokens)
        pages = held if self._whole else min(pages, held)
        self.num_free += pages
        self.counts["forced"] += 1
        left = min(victim.present_tokens, (held - pages) * self.block_tokens)
        lost = victim.present_tokens - left
        self.counts["recomputed" if self._whole else "copied"] += lost
        victim.present_tokens = left

    def remove(self, request: LayoutRequest) -> None:
        """Free its pages."""
        self.num_free += self.blocks_for(request.present_tokens)
        request.present_tokens = 0


class Bidirectional(Layout):
    """Blocks with an owner on either side. Offline requests open free blocks only."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._offline_only: dict[Block, None] = {}  # In the order they were opened.

    def add(self, request: LayoutRequest, tokens: int, offline: list[LayoutRequest] | None) -> bool:
        """Fill the request's open block, then free blocks, then the free side of others' blocks."""
        is_online = offline is not None
        size = self.block_tokens
        room = 0
        if request.blocks:
            last = request.blocks[-1]
            used = last.online_tokens if is_online else last.offline_tokens + last.online_tokens
            room = size - used
        more = self.blocks_for(max(tokens - room, 0))
        shared = more - self.num_free
        if shared > (len(self._offline_only) if is_online else 0):
            return False
        request.length_tokens += tokens
        request.present_tokens += tokens
        if room > 0:
            self._fill(request.blocks[-1], min(room, tokens), is_online=is_online)
        left = tokens - min(room, tokens)
        for _ in range(more):
            block = self._open(request, is_online=is_online)
            self._fill(block, min(size, left), is_online=is_online)
            left -= min(size, left)
        return True

    def _open(self, request: LayoutRequest, *, is_online: bool) -> Block:
        if self.num_free:
            self.num_free -= 1
            block = Block()
        else:
            block = min(self._offline_only, key=lambda block: block.offline_tokens)
            del self._offline_only[block]
            self.counts["forced"] += 1
        if is_online:
            block.online = request
        else:
            block.offline = request
            self._offline_only[block] = None
        request.blocks.append(block)
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
        self.counts["copied"] += overwritten
        block.offline_tokens -= overwritten
        victim.present_tokens -= overwritten
        if not block.offline_tokens:
            block.offline = None
            victim.blocks.remove(block)

    def remove(self, request: LayoutRequest) -> None:
        """Free its sides, and the blocks that are empty then."""
        for block in request.blocks:
            if block.online is request:
                block.online, block.online_tokens = None, 0
                if block.offline is not None:
                    self._offline_only[block] = None
            else:
                block.offline, block.offline_tokens = None, 0
                self._offline_only.pop(block, None)
            if block.online is None and block.offline is None:
                self.num_free += 1
        request.blocks, request.present_tokens = [], 0


class LayoutEngine:
    """Requests on a layout, step by step."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout = layout
        # Apart, so that all layouts get the same online load.
        self._lengths = {
            ONLINE: ONLINE.draws(seed),
            OFFLINE: OFFLINE.draws(-1 - seed),
        }
        self._arrivals = random.Random(seed)
        self._queue: list[LayoutRequest] = []
        self._online: list[LayoutRequest] = []
        self._offline: list[LayoutRequest] = []
        self._unused_share = 0.0

    def _new_request(self, lengths: Lengths) -> LayoutRequest:
        return LayoutRequest(*next(self._lengths[lengths]))

    def run(self, steps: int) -> dict[str, float]:
        """Return the figures of so many steps."""
        for step in range(steps):
            rate = ARRIVALS_PER_STEP[step // BURST_STEPS % 2]
            while self._arrivals.random() < rate / (1 + rate):
                self._queue.append(self._new_request(ONLINE))
            self._admit_online()
            self._decode()
            self._admit_offline()
            self._measure()
        counts = self._layout.counts
        names = ("forced", "copied", "recomputed", "online_tokens", "offline_tokens")
        return {
            "fragmentation": self._unused_share / steps,
            **{name: counts[name] for name in names},
        }

    def _admit_online(self) -> None:
        while self._queue:
            request = self._queue[0]
            if not self._layout.add(request, request.prompt_tokens, self._offline):
                return
            self._online.append(self._queue.pop(0))

    def _decode(self) -> None:
        layout = self._layout
        for request in list(self._online):
            if layout.add(request, 1, self._offline):
                self._generated(request, self._online, "online_tokens")
        for request in list(self._offline):
            is_whole = request.present_tokens == request.length_tokens
            if is_whole and layout.add(request, 1, None):
                self._generated(request, self._offline, "offline_tokens")

    def _generated(
        self, request: LayoutRequest, requests: list[LayoutRequest], counted: str
    ) -> None:
        request.generated_tokens += 1
        self._layout.counts[counted] += 1
        if request.generated_tokens >= request.output_tokens:
            self._layout.remove(request)
            requests.remove(request)

    def _admit_offline(self) -> None:
        layout = self._layout
        reserve = int(layout.num_blocks * RESERVED_SHARE)
        is_room_left = True
        for request in self._offline:
            missing = request.length_tokens - request.present_tokens
            if missing:
                is_room_left = layout.blocks_for(missing) + 1 <= layout.num_free - reserve
                if not (is_room_left and layout.restore(request)):
                    return
        while is_room_left and len(self._offline) < MOST_OFFLINE_ROWS:
            request = self._new_request(OFFLINE)
            whole_tokens = request.prompt_tokens + request.output_tokens
            if layout.blocks_for(whole_tokens) > layout.num_free - reserve:
                return
            layout.add(request, request.prompt_tokens, None)
            self._offline.append(request)

    def _measure(self) -> None:
        layout = self._layout
        taken = (layout.num_blocks - layout.num_free) * layout.block_tokens
        used = sum(request.present_tokens for request in (*self._online, *self._offline))
        self._unused_share += (taken - used) / (layout.num_blocks * layout.block_tokens)


LAYOUTS: Final[dict[str, Callable[[], Layout]]] = {
    **{f"whole, page {n}": partial(Paged, n, whole=True) for n in (16, 64)},
    **{f"tail, page {n}": partial(Paged, n, whole=False) for n in (1, 16, 64)},
    **{f"bidirectional, block {n}": partial(Bidirectional, n) for n in (16, 64, 128)},
}


def compare_layouts(conditions: Conditions) -> Iterator[Findings]:
    """Fragmentation, retractions, tokens copied and computed again; means over three seeds."""
    rows: list[tuple[Cell, ...]] = []
    for name, make in LAYOUTS.items():
        steps = round(STEPS_PER_SECOND * conditions.seconds)
        runs = [LayoutEngine(make(), seed).run(steps) for seed in SEEDS]
        means = [fmean(run[key] for run in runs) for key in runs[0]]
        rows.append((name, 100 * means[0], *(round(mean) for mean in means[1:])))
    columns = ("unused slots in taken blocks, %", "forced retractions", "tokens copied")
    more = ("tokens computed again", "online tokens", "offline tokens")
    yield Findings("§V", ("layout", *columns, *more), rows)
