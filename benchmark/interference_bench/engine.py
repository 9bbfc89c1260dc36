"""A real scheduler and model in one thread, given a load on a virtual clock."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from common.schedulers import run_loop, start_scheduler
from common.tokenized_request import tokenized_request
from interference_bench.load import Load, OnlineArrival
from interference_bench.outcome import LiveRequest, RunOutcome, outcome_of
from interference_bench.systems import EngineSystem
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.emulation.device_module import VirtualTime
from sglang_coserve.srt.emulation.model_directory import (
    flag_defaults,
    read_emulation,
    set_environment_defaults,
)

_CPU_SETTINGS: Final[Mapping[str, Any]] = {
    "chunked_prefill_size": 2048,
    "disable_overlap_schedule": True,
}
"""Fields of ``ServerArgs`` of an engine that computes on the CPU."""

_WARM_UP_S: Final = 3.0
"""Offline requests run before the first online one, so that none meets an empty engine."""

_PROFILE_S: Final = 6.0


class _Spent(NamedTuple):
    """Since the engine began."""

    host_s: float
    """CPU time of the scheduler's thread, without bringing it requests."""

    num_steps: int
    busy_s: float


class CpuClockEngine:
    """For ``OwnProcess``, since SGLang allows one scheduler a process; on one core.

    A model that is emulated computes on a device of its own beside the CPU's time.
    """

    def __init__(
        self,
        system: EngineSystem,
        model: Path,
        core: int,
        targets_ms: Mapping[str, float],
        host_factor: float = 1.0,
        flags: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start a scheduler.

        Args:
            system: what runs.
            model: its folder.
            core: where.
            targets_ms: of systems that take some.
            host_factor: how long a second of CPU time is.
            flags: fields of ``ServerArgs``, for all systems.
        """
        os.sched_setaffinity(0, {core})
        os.environ["OMP_NUM_THREADS"] = "1"
        self._clock = VirtualTime(host_factor)
        # Until the process ends. SGLang keeps references to the other, if it was imported before.
        real_clock = time.perf_counter
        self._clock.install()
        _replace_in_sglang(real_clock, self._clock)
        self._system = system
        self._emulation = read_emulation(model)
        usual = _CPU_SETTINGS
        if self._emulation is not None:
            usual = flag_defaults(self._emulation)
            self._install_device()
        settings, coserve = _settings_of(system, targets_ms)
        self._scheduler = start_scheduler(model, {**usual, **flags, **settings}, coserve)
        self._vocab_size = int(self._scheduler.model_config.vocab_size)
        self._live: dict[str, LiveRequest] = {}
        self._due: deque[tuple[float, str, OnlineArrival]] = deque()
        self._num_offline = 0
        """Offline requests that have not ended."""

        self._num_runs = 0
        self._busy_s = 0.0
        self._num_steps = 0
        self._bringing_s = 0.0
        """CPU time in which the load was brought."""

        self._watch_results()
        self._arrive_within_steps()

    def _install_device(self) -> None:
        set_environment_defaults()
        from sglang_coserve.srt.emulation.device_module import EmulatedDevice, install

        install(EmulatedDevice(self._clock))

    def run(self, load: Load) -> RunOutcome:
        """Offer a load, wait for its online requests, and abort what is left."""
        self._num_runs += 1
        self._live.clear()
        self._num_offline = 0
        self._scheduler.flush_cache()
        suspended_before = self._num_suspended()
        online = load.online(self._vocab_size)
        begin_s = self._clock() + (_WARM_UP_S if load.offline_in_flight else 0.0)
        for number, request in enumerate(online):
            rid = f"online-{self._num_runs}-{number}"
            self._due.append((begin_s + request.at_s, rid, request))
        num_online = len(self._due)
        prompts = load.offline_prompts(self._vocab_size)
        end_s = begin_s + load.seconds
        at_begin = at_end = self._spent()

        def receive() -> list[Any]:
            nonlocal at_begin, at_end
            now_s = self._clock()
            if now_s < begin_s:
                at_begin = self._spent()
            if now_s < end_s:
                at_end = self._spent()
            entered_s = time.thread_time()
            try:
                return brought(now_s)
            finally:
                self._bringing_s += time.thread_time() - entered_s

        def brought(now_s: float) -> list[Any]:
            messages = self._arrived(now_s)
            if now_s < end_s:
                messages += self._offline(load, prompts)
            if self._scheduler.is_fully_idle() and not messages:
                self._clock.wait_until(self._due[0][0] if self._due else end_s)
                messages = self._arrived(self._clock())
            is_over = self._clock() >= end_s and not self._due and self._num_online_left() == 0
            if is_over:
                messages = self._abort_rest()
                self._scheduler.gracefully_exit = self._scheduler.is_fully_idle()
            return messages

        run_loop(self._scheduler, receive)
        outcome = outcome_of([*self._live.values()], begin_s, end_s, num_online)
        outcome.busy_s = self._busy_s - at_begin.busy_s
        if self._system.coserve is not None:
            outcome.counters = dict(self._scheduler.parts.events)
        outcome.host_s = at_end.host_s - at_begin.host_s
        outcome.num_steps = at_end.num_steps - at_begin.num_steps
        outcome.num_suspended = self._num_suspended() - suspended_before
        return outcome

    # --- What comes ----------------------------------------------------------------------

    def _arrived(self, now_s: float) -> list[Any]:
        messages = []
        while self._due and self._due[0][0] <= now_s:
            at_s, rid, request = self._due.popleft()
            self._live[rid] = LiveRequest(at_s, len(request.prompt), is_offline=False)
            messages.append(self._message(rid, list(request.prompt), request.output_tokens))
        return messages

    def _offline(self, load: Load, prompts: Iterator[list[int]]) -> list[Any]:
        messages = []
        while self._num_offline < load.offline_in_flight:
            self._num_offline += 1
            rid = f"offline-{self._num_runs}-{len(self._live)}"
            prompt = next(prompts)
            self._live[rid] = LiveRequest(self._clock(), len(prompt), is_offline=True)
            messages.append(self._message(rid, prompt, load.offline_output_tokens, is_offline=True))
        return messages

    def _message(
        self, rid: str, prompt: list[int], output_tokens: int, *, is_offline: bool = False
    ) -> Any:
        is_marked = is_offline and self._system.coserve is not None
        tokenizer = self._scheduler.tokenizer
        message = tokenized_request(tokenizer, rid, prompt, output_tokens, offline=is_marked)
        if self._scheduler.enable_priority_scheduling:
            message.priority = 0 if is_offline else 100
        return message

    def _abort_rest(self) -> list[Any]:
        from sglang.srt.managers.io_struct import AbortReq

        return [] if self._scheduler.is_fully_idle() else [AbortReq(rid="", abort_all=True)]

    def _num_online_left(self) -> int:
        return sum(not live.is_offline and not live.is_finished for live in self._live.values())

    def _ended(self, live: LiveRequest) -> None:
        if not live.is_finished:
            live.is_finished = True
            self._num_offline -= live.is_offline

    # --- What is seen --------------------------------------------------------------------

    def _watch_results(self) -> None:
        scheduler = self._scheduler
        process, run = scheduler.process_batch_result, scheduler.run_batch

        def watched(batch: Any, result: Any) -> None:
            reqs = list(batch.reqs)
            is_prefill = batch.forward_mode.is_extend()
            tokens = list(batch.extend_lens) if is_prefill else [1] * len(reqs)
            process(batch, result)
            now_s = self._clock()
            for req, computed in zip(reqs, tokens, strict=True):
                live = self._live.get(req.rid)
                if live is not None:
                    if computed > 1:  # Not a decode, which batches with prompts have, too.
                        live.prefilled.append((bool(live.times_s), computed))
                    new = len(req.output_ids) - len(live.times_s)
                    live.times_s += [now_s] * new
                    if req.finished():
                        self._ended(live)
                    live.num_retracted = req.retraction_count

        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = self._clock()
            self._num_steps += 1
            try:
                return run(*arguments, **named)
            finally:
                if self._emulation is None:
                    self._busy_s += self._clock() - started_s
                else:
                    self._busy_s = scheduler.tp_worker.model_runner.model.launched_s

        sender = scheduler.ipc_channels.send_to_tokenizer
        send_output = sender.send_output

        def noted(output: Any, *arguments: Any) -> None:
            live = self._live.get(str(getattr(output, "rid", "")))
            if live is not None and getattr(output, "finished_reason", None) is not None:
                self._ended(live)  # It was refused.
            send_output(output, *arguments)

        scheduler.process_batch_result = watched
        scheduler.run_batch = timed
        sender.send_output = noted

    def _arrive_within_steps(self) -> None:
        """Let safepoints see who has come meanwhile, as they do at the socket of a server."""
        if self._system.coserve is None:
            return
        scheduler = self._scheduler
        scheduler._rank_clock.arrival_s = self._arrival_s

        def arrivals() -> list[RequestInfo]:
            now_s = self._clock()
            return [
                RequestInfo(rid, RequestClass.ONLINE, len(due.prompt), due.output_tokens, at_s)
                for at_s, rid, due in takewhile(lambda due: due[0] <= now_s, self._due)
            ]

        scheduler.parts.lane.safepoints.gate._arrivals = arrivals

    def _arrival_s(self, req: Any, now_s: float) -> float:
        live = self._live.get(req.rid)
        return now_s if live is None else live.at_s

    def _spent(self) -> _Spent:
        return _Spent(time.thread_time() - self._bringing_s, self._num_steps, self._busy_s)

    def _num_suspended(self) -> int:
        if self._system.coserve is None:
            return 0
        safepoints = self._scheduler.parts.lane.safepoints.state().get("safepoints") or {}
        return sum(safepoints.get("suspended", {}).values())


def _replace_in_sglang(former: object, value: object) -> None:
    """Let modules of SGLang that were imported before refer to ``value`` instead."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            kept = [key for key, held in vars(module).items() if held is former]
            for key in kept:
                setattr(module, key, value)


def _settings_of(
    system: EngineSystem, targets_ms: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the settings of SGLang and of co-serving; None for stock SGLang."""
    settings = {"skip_server_warmup": True, **system.flags}
    if system.coserve is None:
        return settings, None
    targets = targets_ms if system.takes_slo else {}
    return settings, {**targets, **system.coserve, "startup_profile_seconds": _PROFILE_S}
