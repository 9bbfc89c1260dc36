"""Engines modelled as so many requests and a prefix cache, fed by the gateway's placement."""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from sglang_coserve.core.line_placement import LINES_AHEAD, LinePlacement, Placed, line_window
from sglang_coserve.jsonl.prefix_key import KEY_BLOCK_BYTES
from sglang_coserve.simulator.prefix_cache import Node, SimulatedPrefixCache

__all__ = ["FleetRun", "ModelledFleet", "grouped_keys"]

_LOOK_S: Final = 0.5
"""As often as a gateway asks for loads."""

_SERVICE_S: Final = (1.0, 5.0)
"""How long a line runs, at random; longer or shorter changes the time, not who gets what."""


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What came of one run."""

    hit_rate: float
    """Part of the prompts' blocks that were found in an engine's cache."""

    lines_per_s: float
    """Of modelled time."""

    most_by_mean: float
    """Lines of the engine that served most, by the mean of all."""

    decisions_per_s: float
    """Lines that were placed, by the CPU time of this machine that it took."""


def grouped_keys(groups: int, members: int, shared: int, own: int, seed: int) -> list[bytes]:
    """Return prefix keys in the order in which a batch is served: group by group.

    Every prompt has ``shared`` blocks in common with its group and ``own`` of its own.
    """
    rng = random.Random(seed)
    keys = []
    for _ in range(groups):
        head = rng.randbytes(shared * KEY_BLOCK_BYTES)
        keys += [head + rng.randbytes(own * KEY_BLOCK_BYTES) for _ in range(members)]
    return keys


@dataclass(slots=True)
class _Engine:
    cache: SimulatedPrefixCache
    window: int = LINES_AHEAD
    waiting: deque[int] = field(default_factory=deque)
    running: dict[int, Node] = field(default_factory=dict)
    num_served: int = 0


class ModelledFleet:
    """``engines`` engines of ``max_requests`` each, with room for ``cache_blocks`` blocks of KV."""

    def __init__(
        self, engines: int, max_requests: int, cache_blocks: int, *, by_prefix: bool, seed: int
    ) -> None:
        self._max_requests = max_requests
        self._cache_blocks = cache_blocks
        self._rng = random.Random(seed)
        # A page is a block of the key, so that a key is a prompt of its blocks.
        self._engines = {f"engine-{n}": _Engine(SimulatedPrefixCache(1)) for n in range(engines)}
        self._placement = LinePlacement(by_prefix=by_prefix)
        self._keys: Sequence[bytes] = ()
        self._ends: list[tuple[float, int, str]] = []
        self._blocks_found = 0
        self._decision_s = 0.0
        self._now_s = 0.0

    def run(self, keys: Sequence[bytes]) -> FleetRun:
        """Serve lines with these prefix keys, in this order. Once."""
        self._keys = keys
        coming, num_inside, num_done = iter(range(len(keys))), 0, 0
        next_look_s = 0.0
        while num_done < len(keys):
            if not self._ends or self._ends[0][0] >= next_look_s:
                self._now_s, next_look_s = next_look_s, next_look_s + _LOOK_S
                self._look()
            else:
                self._now_s, line, name = heapq.heappop(self._ends)
                self._end(line, name)
                num_inside, num_done = num_inside - 1, num_done + 1
            # As many as the Batch API would have in flight.
            most = sum(engine.window + LINES_AHEAD for engine in self._engines.values())
            for line in islice(coming, max(0, most - num_inside)):
                num_inside += 1
                self._decided(self._placement.offer, line, keys[line])
        served = [engine.num_served for engine in self._engines.values()]
        return FleetRun(
            hit_rate=self._blocks_found / sum(len(key) // KEY_BLOCK_BYTES for key in keys),
            lines_per_s=len(keys) / self._now_s,
            most_by_mean=max(served) * len(served) / sum(served),
            decisions_per_s=len(keys) / self._decision_s,
        )

    def _look(self) -> None:
        """Set every window, as a gateway does that has asked for the loads."""
        for name, engine in self._engines.items():
            in_flight = len(engine.waiting) + len(engine.running)
            engine.window = line_window(in_flight, len(engine.waiting))
            self._decided(self._placement.set_engine, name, window=engine.window, is_open=True)

    def _end(self, line: int, name: str) -> None:
        engine = self._engines[name]
        engine.cache.unlock(engine.running.pop(line))
        engine.num_served += 1
        self._start(name)
        self._decided(self._placement.end, line)

    def _decided(self, call: Callable[..., list[Placed]], *args: Any, **settings: Any) -> None:
        """Carry out what the placement decides in a call, and count the time that it takes."""
        start_s = time.thread_time()
        placed = call(*args, **settings)
        self._decision_s += time.thread_time() - start_s
        for line, name in placed:
            assert isinstance(line, int)
            self._engines[name].waiting.append(line)
            self._start(name)

    def _start(self, name: str) -> None:
        """Run what waits in an engine, as far as an engine runs so many."""
        engine = self._engines[name]
        while engine.waiting and len(engine.running) < self._max_requests:
            line = engine.waiting.popleft()
            key, cache = self._keys[line], engine.cache
            num_blocks = len(key) // KEY_BLOCK_BYTES
            node = cache.lock(key, num_blocks)
            self._blocks_found += node.depth_tokens
            too_many = cache.total_tokens + num_blocks - node.depth_tokens - self._cache_blocks
            if too_many > 0:
                cache.evict(too_many)
            engine.running[line], _ = cache.extend(node, key, num_blocks)
            end_s = self._now_s + self._rng.uniform(*_SERVICE_S)
            heapq.heappush(self._ends, (end_s, line, name))
