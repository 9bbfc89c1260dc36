"""Time of one scheduling decision, ``Scheduler.plan``.

    python benchmark/bench_scheduler.py

A busy instance: ``--running`` rows of which half are online decodes, the rest
offline decodes and one unfinished offline prefill; ``--waiting`` online requests
without KV; and a hundredth of ``--offline``, then all of them, in the offline
queue, which must not change the time. Targets are TTFT 1 s and TPOT 100 ms; the
latency model is about that of Llama-3.1-8B on an H100.

Three loads: ``burst``, the waiting prompts, of 500 to 2500 tokens, exceed what fits
one iteration; ``steady``, all of them, of 16 to 48 tokens, join it, and offline work
fills the rest; ``idle``, no online request at all.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from statistics import median

import numpy as np

from sglang_coserve.core.latency_model import PolynomialModel
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest, pack_tokens
from sglang_coserve.core.policies import POLICIES, make_policy
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import OnlineOrder, SchedulerConfig
from sglang_coserve.core.slo import deadlines
from sglang_coserve.core.snapshot import EngineSnapshot, RequestInfo, Row
from sglang_coserve.metrics import SloTargets

MODEL = PolynomialModel(
    compute_token_s=20e-6, attention_pair_s=0.9e-9, context_token_s=4e-8, iteration_s=6e-3
)
TARGETS = SloTargets(ttft_s=1.0, tpot_s=0.1)
WAITING_PROMPT_TOKENS = {"burst": (500, 2500), "steady": (16, 48)}
"""Shortest and longest prompt of the waiting online requests."""


class NoCache:
    """A prefix cache without hits."""

    def cached_tokens(self, rid: str) -> int:
        """Return 0."""
        del rid
        return 0


def main() -> None:
    """Run the benchmark and print its figures."""
    arguments = parse_arguments()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{arguments.running} running, {arguments.waiting} online waiting; µs per plan")
    print(f"{'policy':15} {'load':7} {'offline waiting':>15} {'median':>7} {'p99':>7}")
    snapshots = {load: busy_instance(arguments, load) for load in ("burst", "steady", "idle")}
    for policy in arguments.policies:
        for num_offline in (arguments.offline // 100, arguments.offline):
            scheduler = waiting_behind(arguments, policy, num_offline)
            for load, snapshot in snapshots.items():
                times_us = measure(scheduler, snapshot, arguments.repeat)
                p99_us = float(np.percentile(times_us, 99))
                print(
                    f"{policy:15} {load:7} {num_offline:15} {median(times_us):7.0f} {p99_us:7.0f}"
                )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=64)
    parser.add_argument("--offline", type=int, default=100_000)
    parser.add_argument("--order", default="fcfs", choices=[order.value for order in OnlineOrder])
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def busy_instance(arguments: argparse.Namespace, load: str) -> EngineSnapshot:
    """Return an instance under one of the loads."""
    rng = random.Random(arguments.seed)
    rows = []
    for number in range(arguments.running):
        is_online = load != "idle" and number % 2 == 0
        is_prefill = number == arguments.running - 1
        prompt_tokens = rng.randint(200, 2000)
        generated = 0 if is_prefill else rng.randint(1, 200)
        rows.append(
            Row(
                info(f"row-{number}", is_online=is_online, prompt_tokens=prompt_tokens),
                RequestState.PREFILLING if is_prefill else RequestState.DECODING,
                generated,
                64 if is_prefill else prompt_tokens + generated - 1,
                last_token_s=None if is_prefill else 10.0,
            )
        )
    waiting = [
        Row(
            info(
                f"waiting-{number}",
                is_online=True,
                prompt_tokens=rng.randint(*WAITING_PROMPT_TOKENS[load]),
                arrival_s=9.7 + number / 1000,
            ),
            RequestState.WAITING,
            0,
            0,
        )
        for number in range(arguments.waiting if load != "idle" else 0)
    ]
    return EngineSnapshot(
        now_s=10.001,
        rows=rows,
        waiting=waiting,
        free_kv_tokens=200_000 // arguments.page_tokens * arguments.page_tokens,
        evictable_kv_tokens=0,
        free_slots=1000,
        max_batch_tokens=8192,
        page_tokens=arguments.page_tokens,
    )


def info(rid: str, *, is_online: bool, prompt_tokens: int, arrival_s: float = 5.0) -> RequestInfo:
    """Return a request of one of three users."""
    return RequestInfo(
        rid=rid,
        request_class=RequestClass.ONLINE if is_online else RequestClass.OFFLINE,
        prompt_tokens=prompt_tokens,
        max_new_tokens=256,
        arrival_s=arrival_s,
        user=f"user-{len(rid) % 3}" if is_online else None,
    )


def waiting_behind(arguments: argparse.Namespace, name: str, num_offline: int) -> Scheduler:
    """Return a scheduler with this many offline requests in its queue."""
    policy = make_policy(name)
    config = SchedulerConfig(online_order=OnlineOrder(arguments.order))
    queue = OfflineQueue(policy.queue_config())
    scheduler = Scheduler(policy, MODEL, deadlines(TARGETS), queue, config)
    rng = np.random.default_rng(arguments.seed)
    prompts = rng.integers(0, 128_000, (num_offline, 64))
    for number, prompt in enumerate(prompts):
        tokens = pack_tokens(np.tile(prompt, 8).tolist())
        scheduler.add_offline(QueuedRequest(f"offline-{number}", tokens, number * 1e-4, 256))
    return scheduler


def measure(scheduler: Scheduler, snapshot: EngineSnapshot, repeat: int) -> list[float]:
    """Return the microseconds of each call; a plan that is not committed changes nothing."""
    cache = NoCache()
    times_us = []
    for _ in range(repeat):
        start_s = time.perf_counter()
        scheduler.plan(snapshot, cache)
        times_us.append((time.perf_counter() - start_s) * 1e6)
    return times_us


if __name__ == "__main__":
    main()
