"""Speed and memory of the offline queue with many waiting requests.

    python benchmark/bench_offline_queue.py --requests 1000000

Requests share prefixes as a batch job's do: each of ``--groups`` prompts starts
with its subject's part, and all subjects of a dataset with the dataset's part.
The requests arrive shuffled, all with the same deadline. Then ``--picks`` of
them are picked and removed. Generating them is not timed.

Memory is the growth of the process's resident set less the bytes of the prompts:
request objects, their ids, the queue, and what the allocator keeps.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from sglang_coserve.core.offline_queue import (
    OfflineQueue,
    OfflineQueueConfig,
    PackedTokens,
    QueuedRequest,
)

VOCAB_TOKENS = 128_256
SUBJECTS_PER_DATASET = 20
ADD_BATCH_REQUESTS = 10_000


def main() -> None:
    """Run the benchmark and print its figures."""
    arguments = parse_arguments()
    rng = np.random.default_rng(arguments.seed)
    queue = OfflineQueue(
        OfflineQueueConfig(utility_ratio=arguments.utility_ratio, seed=arguments.seed)
    )
    num_requests, num_picks = arguments.requests, min(arguments.picks, arguments.requests)

    before_bytes = resident_bytes()
    add_s = 0.0
    requests = generate(rng, num_requests, arguments.tokens, arguments.groups)
    for _ in track(range(0, num_requests, ADD_BATCH_REQUESTS), "add"):
        batch = list(itertools.islice(requests, ADD_BATCH_REQUESTS))
        start_s = time.perf_counter()
        for request in batch:
            queue.add(request)
        add_s += time.perf_counter() - start_s
    del batch, requests
    extra_bytes = resident_bytes() - before_bytes - num_requests * arguments.tokens * 4

    def pick_and_remove() -> None:
        request = queue.pick(now_s=0.0)
        assert request is not None
        queue.remove(request.rid)

    def look_ahead() -> None:
        assert next(itertools.islice(queue.candidates(now_s=0.0), 63, 64), None) or len(queue) < 64

    look_us = timed_us(look_ahead, min(1000, num_picks), "look at 64")
    pick_us = timed_us(pick_and_remove, num_picks, "pick, remove")

    print(
        f"\n{num_requests:,} requests of {arguments.tokens} tokens, {arguments.groups:,} prefixes"
    )
    print(f"add              {num_requests / add_s:12,.0f} /s")
    for name, samples_us in (("pick + remove", pick_us), ("64 candidates", look_us)):
        p50, p99, most = np.percentile(samples_us, [50, 99, 100])
        print(f"{name}    {p50:12.1f} us median {p99:12.1f} us P99 {most:12.1f} us max")
    print(f"memory           {extra_bytes / 1e6:12,.0f} MB beyond the prompts", end="")
    print(f" ({extra_bytes / num_requests:,.0f} bytes a request)")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Speed and memory of the offline queue.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=512, help="prompt tokens of a request")
    parser.add_argument("--groups", type=int, default=2_000, help="distinct shared prefixes")
    parser.add_argument("--picks", type=int, default=200_000, help="requests to pick and remove")
    parser.add_argument("--utility-ratio", type=float, default=OfflineQueueConfig().utility_ratio)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def generate(
    rng: np.random.Generator, num_requests: int, num_tokens: int, num_groups: int
) -> Iterator[QueuedRequest]:
    """Yield requests: 1/4 dataset prefix, 1/2 subject prefix, 1/4 of their own."""
    dataset_tokens, subject_tokens = num_tokens // 4, num_tokens // 2
    own_tokens = num_tokens - dataset_tokens - subject_tokens
    datasets = random_tokens(rng, -(-num_groups // SUBJECTS_PER_DATASET), dataset_tokens)
    subjects = random_tokens(rng, num_groups, subject_tokens)
    for number in range(num_requests):
        if number % ADD_BATCH_REQUESTS == 0:
            groups = rng.integers(num_groups, size=ADD_BATCH_REQUESTS)
            own = random_tokens(rng, ADD_BATCH_REQUESTS, own_tokens)
        group = groups[number % ADD_BATCH_REQUESTS]
        tokens = np.concatenate(
            (
                datasets[group // SUBJECTS_PER_DATASET],
                subjects[group],
                own[number % ADD_BATCH_REQUESTS],
            )
        )
        yield QueuedRequest(
            rid=f"request-{number}",
            token_ids=PackedTokens(tokens.tobytes()),
            arrival_s=number * 1e-3,
            max_new_tokens=256,
            deadline_s=86_400.0,
        )


def random_tokens(rng: np.random.Generator, rows: int, tokens: int) -> NDArray[np.uint32]:
    """Return a matrix of token ids."""
    return rng.integers(VOCAB_TOKENS, size=(rows, tokens), dtype=np.uint32)


def timed_us(call: Callable[[], None], repeats: int, name: str) -> NDArray[np.float64]:
    """Return what each of many calls took, in microseconds."""
    samples_ns = np.empty(repeats)
    for index in track(range(repeats), name):
        start_ns = time.perf_counter_ns()
        call()
        samples_ns[index] = time.perf_counter_ns() - start_ns
    return samples_ns / 1e3


def resident_bytes() -> int:
    """Return the resident set: now where /proc tells it, else its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
