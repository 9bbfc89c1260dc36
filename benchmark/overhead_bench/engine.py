"""A real scheduler whose steps are timed one by one; for ``OwnProcess``.

Time counts for the code that runs: our overrides, or methods of SGLang that they call or that call
them.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.schedulers import run_loop, start_scheduler
from common.tokenized_request import tokenized_request
from interference_bench.systems import EngineSystem
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu

RUNNING: Final = 32
ONLINE_SHARE: Final = 1 / 4
"""Share of the running requests that are online; they decode all the time."""

ONLINE_OUTPUT_TOKENS: Final = 3000
"""Longer than the benchmark."""

PREFIXES: Final = 100
"""Half of an offline prompt is one of these."""

WARM_UP_PASSES: Final = 8
LEAST_PASSES: Final = 8

_METHODS: Final = (
    *("get_next_batch_to_run", "get_new_batch_prefill", "update_running_batch"),
    *("is_disable_overlap_for_batch", "run_batch", "process_batch_result"),
)
"""Methods of a step that we override."""


_POLICY: Final = {"offline_policy": "coserve"}
SYSTEMS: Final = {
    "coserve": EngineSystem(_POLICY),
    "stock priority": EngineSystem(flags={"enable_priority_scheduling": True}),
    "bros": EngineSystem({"offline_policy": "bros"}),
    "coserve overlap on": EngineSystem(_POLICY, {"disable_overlap_schedule": False}),
    "coserve overlap off": EngineSystem(_POLICY, {"disable_overlap_schedule": True}),
    "stock overlap on": EngineSystem(flags={"disable_overlap_schedule": False}),
    "stock overlap off": EngineSystem(flags={"disable_overlap_schedule": True}),
}


@dataclass
class Pass:
    """A scheduling pass, and the step after it. Times are in seconds."""

    pass_s: float
    stock_s: float
    """Time of the pass in SGLang's code."""

    step_s: float = 0.0
    """From the beginning of this pass to the beginning of the next."""

    own_s: float = 0.0
    """Time of the step in our overrides, the pass among them."""


class _Meter:
    """Counts time for the method that was entered last."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._runs = ["other"]
        self._since_s = clock_s()
        self._seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, who: str) -> None:
        """Count the time of a method to ``who``, without the methods that it calls of others."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self._switch(lambda: self._runs.append(who))
            try:
                return function(*arguments, **named)
            finally:
                self._switch(self._runs.pop)

        setattr(owner, name, timed)

    def take(self) -> Mapping[str, float]:
        """Return the seconds since the last call, by who ran."""
        self._switch(lambda: None)
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def _switch(self, change: Callable[[], object]) -> None:
        now_s = self._clock_s()
        self._seconds[self._runs[-1]] += now_s - self._since_s
        change()
        self._since_s = self._clock_s()


class TimedEngine:
    """A scheduler whose event loop runs for some passes at a time."""

    def __init__(self, system: EngineSystem, model: Path, num_running: int = RUNNING) -> None:
        self.scheduler = start(system, model, num_running)
        self._is_stock = system.coserve is None
        self._clock_s = time.perf_counter if cpu.has_cuda() else time.thread_time
        self._meter = _Meter(self._clock_s)
        self._rng = random.Random(0)
        self._prefixes = [self._tokens(32) for _ in range(PREFIXES)]
        self._num_sent = 0
        self._passes: list[Pass] = []
        self._pass_started_s = self._away_s = 0.0
        self._pending: list[Any] = []
        self._time_passes()
        for _ in range(num_online(num_running)):
            self._send(self._tokens(64), ONLINE_OUTPUT_TOKENS, is_offline=False)

    def attention_backend(self) -> str:
        """Return the name of the attention backend in effect."""
        from sglang_coserve.srt.profiling.executor import machine_of

        return machine_of(self.scheduler).attention_backend

    def run(self, num_waiting: int, num_passes: int, limit_s: float) -> list[Pass]:
        """Run passes, before each of which so many wait; return all but the first ones."""
        self._fill(num_waiting)
        first = len(self._passes) + WARM_UP_PASSES
        end_s = time.perf_counter() + limit_s

        def receive() -> list[Any]:
            started_s = self._clock_s()
            if self._pending:
                self.scheduler.result_queue.extend(self._pending)
                self._pending.clear()
            done = len(self._passes) - first
            # Of the last pass nobody sees the end of the step.
            self.scheduler.gracefully_exit = done > num_passes or (
                time.perf_counter() > end_s and done > LEAST_PASSES
            )
            self._fill(num_waiting)
            self._away_s += self._clock_s() - started_s
            return []

        run_loop(self.scheduler, receive)
        # Under overlap scheduling the last batch's result, which the next loop would forget.
        self._pending = list(compat.results_in_flight(self.scheduler))
        return self._passes[first:-1]

    def _time_passes(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.scheduler import Scheduler

        meter, own = self._meter, type(self.scheduler).__mro__
        meter.wrap(ScheduleBatch, "filter_batch", "stock")
        for name in _METHODS:
            meter.wrap(Scheduler, name, "stock")
            for kind in own[: own.index(Scheduler)]:
                if name in vars(kind):
                    meter.wrap(kind, name, "own")
        whole = self.scheduler.get_new_batch_prefill

        def one_pass(running_batch: Any) -> Any:
            now_s, before = self._clock_s(), meter.take()
            if self._passes:
                last = self._passes[-1]
                last.step_s = now_s - self._pass_started_s - self._away_s
                last.own_s += before["own"]
            self._pass_started_s, self._away_s = now_s, 0.0
            result = whole(running_batch)
            during, whole_s = meter.take(), self._clock_s() - now_s
            own_s = during["own"]
            stock_s = whole_s if self._is_stock else whole_s - own_s
            self._passes.append(Pass(whole_s, stock_s, own_s=own_s))
            return result

        self.scheduler.get_new_batch_prefill = one_pass

    def _fill(self, num_waiting: int) -> None:
        waiting = (
            len(self.scheduler.waiting_queue)
            if self._is_stock
            else self.scheduler.parts.admission.num_waiting()
        )
        for _ in range(num_waiting - waiting):
            prompt = self._rng.choice(self._prefixes) + self._tokens(32)
            self._send(prompt, self._rng.randint(16, 48), is_offline=True)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(10, self.scheduler.model_config.vocab_size), k=count)

    def _send(self, prompt: list[int], output_tokens: int, *, is_offline: bool) -> None:
        self._num_sent += 1
        rid, tokenizer = f"request-{self._num_sent}", self.scheduler.tokenizer
        request = tokenized_request(tokenizer, rid, prompt, output_tokens, offline=is_offline)
        if self.scheduler.enable_priority_scheduling:
            request.priority = int(not is_offline)
        self.scheduler.process_input_requests([request])


def num_online(num_running: int) -> int:
    """Return how many of the running requests are online."""
    return round(ONLINE_SHARE * num_running)


def start(system: EngineSystem, model: Path, num_running: int) -> Any:
    """Return a scheduler with as many places as run at a time, and KV for all of them."""
    online_tokens = (ONLINE_OUTPUT_TOKENS + 72) * num_online(num_running)
    settings = {
        "max_running_requests": num_running,
        "max_total_tokens": 256 * num_running + online_tokens,
        "chunked_prefill_size": 512,
        **({} if cpu.has_cuda() else {"sleep_on_idle": False}),
        **system.flags,
    }
    if system.coserve is None:
        return start_scheduler(model, settings, None)
    coserve = {
        **system.coserve,
        # So long that no offline request is held back: as many run as with stock SGLang.
        "slo_ttft_ms": 5000.0,
        "slo_tpot_ms": 2000.0,
        "startup_profile_seconds": 0.0,
    }
    return start_scheduler(model, settings, coserve)
