"""How much offline work any scheduler could do beside online requests: an upper bound.

It is one for a load that goes on as in a window. The window is cut into ``n`` steps, n being free.
Added up over the steps are the sums that a latency model asks for: all work of the window's online
requests, and of complete offline requests. A model whose time is convex in these sums predicts for
n equal steps no more than for any other n steps with the same sums; so offline work that makes even
n equal steps longer than the window, for every n that is possible, cannot be done. See
``docs/benchmarks.md``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest

_HALVINGS: Final = 60
"""Of a bisection: as many as a float has bits."""

_THIRDS: Final = 80
"""Of a search for the least of a convex function, to 1e-14 of its range."""

_STEP: Final = 1e-4
_FEW: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a step and the device hold at most."""

    batch_tokens: int
    requests: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class OfflineShape:
    """Of each offline request; there are always more, and no two share a prefix."""

    prompt_tokens: int
    output_tokens: int


class Required(NamedTuple):
    """The work of online requests, in sums over the steps that do it."""

    prompts: float = 0
    prompt_tokens: float = 0
    pairs: float = 0
    """Query–key pairs of prompts."""

    decodes: float = 0
    keys: float = 0
    """That decodes read."""

    held: float = 0
    """Of them, those that no other request has, too."""

    steps: float = 0
    """Steps that must be different ones, as each makes one token of one request."""


def required(
    trace: Sequence[TraceRequest], targets: SloTargets, *, late_share: float = 0.0
) -> Required:
    """Return all the work of online requests.

    Of prefixes that an earlier request had nothing is computed again. O(n log n + blocks).

    Args:
        trace: In order of arrival.
        targets: A request has its first token within the TTFT target, and each further one the
            TPOT target later, at the latest. So they bound which requests may share steps.
        late_share: So many of the requests may get nothing: of each sum the largest parts are left
            out.
    """
    ttft_s, tpot_s = (math.inf if t is None else t for t in (targets.ttft_s, targets.tpot_s))
    parts: list[Required] = []
    spans: list[tuple[float, float, int]] = []
    seen: set[int] = set()
    for request in trace:
        cached = cached_tokens(request, seen)
        prompt, outputs = request.prompt_tokens, request.output_tokens
        tokens, decodes = prompt - cached, outputs - 1
        # In the shortest chunks there are the fewest pairs.
        pairs = tokens * cached + tokens * (tokens + 1) // 2
        keys, held = _keys(prompt, outputs), _keys(tokens, outputs)
        parts.append(Required(1, tokens, pairs, decodes, keys, held))
        end_s = request.arrival_s + ttft_s + (decodes * tpot_s if decodes else 0.0)
        spans.append((request.arrival_s, end_s, outputs))
    if not parts:
        return Required()
    left_out = int(late_share * len(parts))
    sums = Required(*(_less_largest(column, left_out) for column in zip(*parts, strict=True)))
    return sums._replace(steps=_different_steps(spans, left_out))


def offline_bound(
    model: LatencyModel,
    capacity: Capacity,
    offline: OfflineShape,
    online: Required,
    window_s: float,
) -> float:
    """Return the most offline tokens a second, prompt and output, that are possible.

    It holds for a load that goes on for ever as in the window. In a short window more is possible,
    by what is put off until it is over. 0 where even the online work does not fit.

    Args:
        model: Of the time of a step: convex, as a roofline is.
        capacity: Of a step and the device.
        offline: Every request is complete.
        online: All work of the online requests that arrive in the window.
        window_s: Its length.
    """
    plan = _Plan(model, capacity, offline, online)
    if plan.least_s(0.0) > window_s:
        return 0.0
    requests = _largest(lambda count: plan.least_s(count) <= window_s)
    return requests * (offline.prompt_tokens + offline.output_tokens) / window_s


@dataclass(frozen=True, slots=True)
class _Plan:
    """The window with a number of offline requests in it."""

    model: LatencyModel
    capacity: Capacity
    offline: OfflineShape
    online: Required

    def least_s(self, requests: float) -> float:
        """Return the least time that this many offline requests take, with the online work."""
        shape, online, capacity = self.offline, self.online, self.capacity
        decodes = requests * (shape.output_tokens - 1)
        prompts = online.prompts + requests
        prompt_tokens = online.prompt_tokens + requests * shape.prompt_tokens
        pairs = online.pairs + requests * (shape.prompt_tokens * (shape.prompt_tokens + 1) / 2)
        all_decodes = online.decodes + decodes
        keys = requests * _keys(shape.prompt_tokens, shape.output_tokens)
        if not prompts and not all_decodes:
            return 0.0
        fewest = max(
            online.steps,
            (prompt_tokens + all_decodes) / capacity.batch_tokens,
            (prompts + all_decodes) / capacity.requests,
            (prompt_tokens + online.held + keys) / capacity.kv_tokens,
        )
        keys += online.keys

        def seconds(steps: float) -> float:
            step = (prompts, prompt_tokens, 0.0, pairs, all_decodes, keys)
            return steps * _convex_s(self.model, [part / steps for part in step])

        fewest_s = seconds(fewest)
        if seconds(fewest * (1 + _STEP)) >= fewest_s:
            return fewest_s  # Convex in the steps, it only grows.
        return _least(seconds, fewest, prompt_tokens + all_decodes)


def _keys(prompt_tokens: int, output_tokens: int) -> int:
    """Return the keys that the decodes of a request read."""
    decodes = output_tokens - 1
    return decodes * (prompt_tokens + 1) + decodes * (decodes - 1) // 2


def cached_tokens(request: TraceRequest, seen: set[int]) -> int:
    """Return the tokens of a prompt that an earlier one began with, and note its own."""
    prefix, cached = 0, 0
    for place, block in enumerate(request.hash_ids, start=1):
        prefix = hash((prefix, block))
        if prefix in seen:
            cached = place * BLOCK_TOKENS
        seen.add(prefix)
    return min(cached, request.prompt_tokens - 1)


def _less_largest(values: Iterable[float], count: int) -> float:
    return sum(sorted(values)[: -count or None])


def _different_steps(spans: Sequence[tuple[float, float, int]], left_out: int) -> float:
    """Return the most output tokens of requests that are never there at the same time.

    Args:
        spans: Of each request its arrival, its last possible moment, and its output tokens.
        left_out: The requests with most tokens do not count.
    """
    ordered = sorted(spans, key=lambda span: span[1])
    ends_s = [end_s for _, end_s, _ in ordered]
    best = [0]
    last: list[tuple[int, int] | None] = [None]
    for place, (arrival_s, _, tokens) in enumerate(ordered):
        before = bisect_right(ends_s, arrival_s, hi=place)
        with_it = best[before] + tokens
        best.append(max(best[-1], with_it))
        last.append((before, tokens) if with_it > best[place] else None)
    chosen: list[int] = []
    place = len(ordered)
    while place:
        step = last[place]
        if step is None:
            place -= 1
        else:
            place = step[0]
            chosen.append(step[1])
    return _less_largest(chosen, left_out)


def _convex_s(model: LatencyModel, parts: Sequence[float]) -> float:
    """Return the time of a step with these sums, less what a model adds for mixing.

    A step with prompts may take a constant more than one without, and the other way round;
    one of equal steps has a bit of everything. O(1).
    """
    prompts, decodes = parts[0], parts[4]
    seconds = _predict(model, parts)
    if prompts and decodes:
        only_prompts, only_decodes = [*parts[:4], 0.0, 0.0], [0.0] * 4 + [*parts[4:]]
        seconds -= _predict(model, [_FEW, *only_decodes[1:]]) - _predict(model, only_decodes)
        seconds -= _predict(model, [*parts[:4], _FEW, 0.0]) - _predict(model, only_prompts)
    return seconds


def _predict(model: LatencyModel, parts: Sequence[float]) -> float:
    """Return the time of a step whose sums need not be whole numbers."""
    return model.predict(StepStats(*parts))  # type: ignore[arg-type]


def _largest(fits: Callable[[float], bool]) -> float:
    """Return the largest number from 0 up that fits; 0 does. Bisection."""
    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
        if high > 1e18:
            return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high


def _least(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the least value of a convex function within the range."""
    high = max(low, high)
    best = min(value(low), value(high))
    for _ in range(_THIRDS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        left_value, right_value = value(left), value(right)
        best = min(best, left_value, right_value)
        low, high = (low, right) if left_value <= right_value else (left, high)
        if high - low <= 1e-9 * high:
            break
    return best
