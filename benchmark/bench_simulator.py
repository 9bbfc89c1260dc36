"""Iterations a second of the simulator, its own share apart from the scheduler's.

    python benchmark/bench_simulator.py --rows 64

``--rows`` requests decode all the time, half of them offline; then the same with
an event log. The scheduler's share is the time inside ``core``; it is the code
that serves in production, so only the rest is the simulator's. Times are CPU
times: what else runs on the machine does not count.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from typing import Any

from sglang_coserve.core.latency_model import RooflineModel, find_hardware
from sglang_coserve.core.offline_queue import OfflineQueue, OfflineQueueConfig
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.engine import Engine
from sglang_coserve.simulator.event_log import EventLog
from sglang_coserve.simulator.executor import Executor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.models import find_model
from sglang_coserve.simulator.observer import Observer
from sglang_coserve.simulator.source import Source
from sglang_coserve.workload import TraceRequest

PROMPT_TOKENS = 512


class TimedScheduler:
    """The scheduler, with a watch on every call."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.seconds = 0.0
        for name in ("add_offline", "plan", "commit", "observe", "restore", "finish"):
            setattr(self, name, self._timed(getattr(scheduler, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start_s = time.process_time()
            answer = call(*arguments)
            self.seconds += time.process_time() - start_s
            return answer

        return timed


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description="Speed of the simulator.")
    parser.add_argument("--rows", type=int, default=64, help="requests that decode")
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--policy", default="conserve")
    arguments = parser.parse_args()
    print(f"{arguments.rows} rows, {arguments.iterations} iterations, {arguments.policy}")
    for name, observers in (("alone", []), ("with event log", [EventLog(io.StringIO(), {})])):
        total_s, scheduler_s = run(arguments, observers)
        own_s = total_s - scheduler_s
        print(
            f"{name:15}"
            f" {arguments.iterations / total_s:8,.0f} iterations/s in all"
            f" {arguments.iterations / own_s:8,.0f} of the simulator alone"
            f" ({own_s / arguments.iterations * 1e6:5.1f} us, scheduler"
            f" {scheduler_s / arguments.iterations * 1e6:5.1f} us an iteration)"
        )


def run(arguments: argparse.Namespace, observers: list[Observer]) -> tuple[float, float]:
    """Return the seconds of the iterations with all rows decoding, and the scheduler's part."""
    model = RooflineModel.from_datasheet(find_model("llama-3.1-8b"), find_hardware("h100"))
    length = PROMPT_TOKENS + 2 * arguments.iterations
    config = ExecutorConfig(
        kv_capacity_tokens=length * (arguments.rows + 1), max_running_requests=arguments.rows
    )
    scheduler = TimedScheduler(
        Scheduler(
            make_policy(arguments.policy),
            model,
            (),
            OfflineQueue(OfflineQueueConfig()),
        )
    )
    offline = arguments.rows // 2
    streams = [
        from_trace(
            [
                TraceRequest(index, 0.0, PROMPT_TOKENS, 2 * arguments.iterations)
                for index in range(count)
            ],
            request_class,
        )
        for request_class, count in (
            (RequestClass.ONLINE, arguments.rows - offline),
            (RequestClass.OFFLINE, offline),
        )
    ]
    executor = Executor(config, model)
    engine = Engine(scheduler, executor, Source(timed=streams), observers)
    while executor.num_decoding < arguments.rows:
        engine.step()
    scheduler.seconds = 0.0
    start_s = time.process_time()
    for _ in range(arguments.iterations):
        engine.step()
    return time.process_time() - start_s, scheduler.seconds


if __name__ == "__main__":
    main()
