"""A real scheduler whose passes are timed one by one; for ``OwnProcess``."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.schedulers import run_loop, start_scheduler
from common.tokenized_request import tokenized_request
from sglang_coserve.srt.cpu import defaults as cpu

ONLINE_SHARE: Final = 1 / 4
"""Of the requests that run."""

ONLINE_OUTPUT_TOKENS: Final = 3000
"""Longer than the benchmark."""

PREFIXES: Final = 100
"""Half of an offline prompt is one of these."""

WARM_UP_PASSES: Final = 8

_AROUND: Final = ("around", "metrics", "load")


@dataclass(frozen=True)
class OverheadSystem:
    """A scheduler to start; stock SGLang's where ``policy`` is None."""

    policy: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


SYSTEMS: Final = {
    "coserve": OverheadSystem("coserve"),
    "fifo": OverheadSystem("fifo"),
    "stock priority": OverheadSystem(flags={"enable_priority_scheduling": True}),
    "coserve overlap on": OverheadSystem("coserve", {"disable_overlap_schedule": False}),
    "coserve overlap off": OverheadSystem("coserve", {"disable_overlap_schedule": True}),
    "stock overlap on": OverheadSystem(flags={"disable_overlap_schedule": False}),
    "stock overlap off": OverheadSystem(flags={"disable_overlap_schedule": True}),
}


@dataclass
class Pass:
    """One scheduling pass, and the step after it."""

    spent_s: dict[str, float]
    """What its parts took, each without the others: "stock" (SGLang's own code), "account" (for the
    last step), "snapshot", "plan", and "rest", what carries the plan out."""

    around_s: dict[str, float] = field(default_factory=dict)
    """What ours takes of the step outside of the pass: "around", "metrics" to gather them and
    publish them where they are wanted, and the whole "load", with SGLang's part of it."""

    iteration_s: float = 0.0


class TimedEngine:
    """A scheduler whose event loop runs for some passes at a time."""

    def __init__(
        self, system: OverheadSystem, model: Path, running: int, online_waits: bool = False
    ) -> None:
        """``running`` requests run at a time; ``online_waits``: online ones wait, not offline."""
        self._online_waits = online_waits
        num_online = int(running * ONLINE_SHARE)
        self.scheduler = start(system, model, running, num_online)
        self._is_stock = system.policy is None
        self._is_planned = system.policy not in (None, "fifo")
        self._clock_s = time.perf_counter if cpu.has_cuda() else time.thread_time
        self._rng = random.Random(0)
        self._prefixes = [self._tokens(32) for _ in range(PREFIXES)]
        self._num_sent = 0
        self._passes: list[Pass] = []
        self._pass_started_s = self._away_s = 0.0
        self._spent_s: dict[str, float] = defaultdict(float)
        self._part, self._since_s = "", 0.0
        self._pending: list[Any] = []
        self._time_passes()
        for _ in range(num_online):
            self._send(self._tokens(64), ONLINE_OUTPUT_TOKENS, is_offline=False)

    def close(self) -> None:
        """Leave everything to the end of the process."""

    def fill(self, num_waiting: int) -> None:
        """Let so many requests wait."""
        for _ in range(num_waiting - self._num_waiting()):
            prompt = self._rng.choice(self._prefixes) + self._tokens(32)
            self._send(prompt, self._rng.randint(16, 48), is_offline=not self._online_waits)
        if self._online_waits and not self._is_stock and not self._num_offline():
            # Passes are planned only beside offline requests.
            self._send(self._tokens(64), 16, is_offline=True)

    def run(self, num_waiting: int, num_passes: int, limit_s: float) -> list[Pass]:
        """Run passes, before each of which so many wait; return all but the first ones."""
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
                time.perf_counter() > end_s and done > 8
            )
            self.fill(num_waiting)
            self._away_s += self._clock_s() - started_s
            return []

        run_loop(self.scheduler, receive)
        # Under overlap scheduling the last batch's result, which the next loop would forget.
        self._pending = list(getattr(self.scheduler, "result_queue", ()))
        return self._passes[first:-1]

    def _time_passes(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.scheduler import Scheduler

        scheduler, around = self.scheduler, "get_next_batch_to_run process_batch_result run_batch"
        for name in around.split():
            self._time("", Scheduler, name)
            if not self._is_stock:
                self._time("around", scheduler, name)
        self._time("stock", Scheduler, "get_new_batch_prefill")
        self._time("stock", ScheduleBatch, "filter_batch")
        if self._is_planned:
            admission = scheduler.parts.admission
            self._time("account", admission, "_learn")
            self._time("snapshot", admission, "_snapshot")
            self._time("plan", admission.core, "plan")
        if not self._is_stock:
            from sglang_coserve.srt.monitoring.online_load import ReportingLoadInquirer

            self._time("load", ReportingLoadInquirer, "get_loads")
            self._time("metrics", scheduler.parts.status, "launched")
            self._time("metrics", scheduler.parts.status, "processed")
        whole = self._timed("rest", scheduler.get_new_batch_prefill)

        def one_pass(running_batch: Any) -> Any:
            now_s = self._clock_s()
            if self._passes:
                last = self._passes[-1]
                last.iteration_s = now_s - self._pass_started_s - self._away_s
                last.around_s = {part: self._spent_s[part] for part in _AROUND}
            self._pass_started_s, self._away_s = now_s, 0.0
            self._spent_s.clear()
            result = whole(running_batch)
            spent_s = dict(self._spent_s)
            spent_s.pop("", None)
            spent_s.pop("around", None)  # The begin of the round, which is the last one's.
            self._passes.append(Pass(spent_s))
            self._spent_s.clear()
            return result

        scheduler.get_new_batch_prefill = one_pass

    def _time(self, part: str, owner: Any, name: str) -> None:
        setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add what ``function`` takes to a part, without what it spends in other parts."""

        def switch(part: str) -> str:
            now_s = self._clock_s()
            last, self._part = self._part, part
            self._spent_s[last] += now_s - self._since_s
            self._since_s = now_s
            return last

        def timed(*arguments: Any, **named: Any) -> Any:
            outer = switch(part)
            try:
                return function(*arguments, **named)
            finally:
                switch(outer)

        return timed

    def _num_waiting(self) -> int:
        if self._is_stock or self._online_waits:
            return len(self.scheduler.waiting_queue)
        return self._num_offline()

    def _num_offline(self) -> int:
        return int(self.scheduler.parts.admission.num_waiting())

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(10, self.scheduler.model_config.vocab_size), k=count)

    def _send(self, prompt: list[int], output_tokens: int, *, is_offline: bool) -> None:
        self._num_sent += 1
        rid, tokenizer = f"request-{self._num_sent}", self.scheduler.tokenizer
        request = tokenized_request(tokenizer, rid, prompt, output_tokens, offline=is_offline)
        if self.scheduler.enable_priority_scheduling:
            request.priority = int(not is_offline)
        self.scheduler.process_input_requests([request])


def start(system: OverheadSystem, model: Path, running: int, num_online: int) -> Any:
    """Return a scheduler with as many places as run at a time, and KV for all of them."""
    settings = {
        "max_running_requests": running,
        "max_total_tokens": 256 * running + (ONLINE_OUTPUT_TOKENS + 72) * num_online,
        "chunked_prefill_size": 512,
        **({} if cpu.has_cuda() else {"sleep_on_idle": False}),
        **system.flags,
    }
    if system.policy is None:
        return start_scheduler(model, settings, None)
    coserve = {
        "offline_policy": system.policy,
        # So long that no offline request is held back: as many run as with stock SGLang.
        "slo_ttft_ms": 5000.0,
        "slo_tpot_ms": 2000.0,
        "startup_profile_seconds": 0.0,
    }
    return start_scheduler(model, settings, coserve)
