"""``python -m ray_bench.job DIRECTORY CPUS ENGINE…``: requests.jsonl of a directory, answered."""

from __future__ import annotations

import sys

import ray

from sglang_coserve.ray import complete, read_requests


def main() -> None:
    """Run the job, or go on with it."""
    directory, cpus, *engines = sys.argv[1:]
    ray.init(num_cpus=int(cpus), include_dashboard=False)
    requests = read_requests(f"{directory}/requests.jsonl", checkpoint=f"{directory}/progress")
    complete(requests, engines=engines).write_parquet(f"{directory}/results")


if __name__ == "__main__":
    main()
