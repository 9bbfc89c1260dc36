"""What recording a request in OpenTelemetry's histograms costs, in CPU time of the HTTP server.

python benchmark/bench_otel_metrics.py

Nothing is recorded in a step: the scheduler is another process.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from sglang_coserve.srt.monitoring.otel_metrics import GenAiMetrics, tier_attributes


def main() -> None:
    """Print the least mean of several runs, so that other work on the machine does not count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="In a run.")
    parser.add_argument("--repeats", type=int, default=7, help="Runs.")
    options = parser.parse_args()
    metrics = GenAiMetrics(MeterProvider([InMemoryMetricReader()]), "model", "127.0.0.1", 30000)
    times = SimpleNamespace(
        get_e2e_latency=lambda: 1.0,
        get_first_token_latency=lambda: 0.1,
        first_token_time=1.0,
        finished_time=2.0,
    )
    attributes = tier_attributes({"coserve_class": "offline"}) | {"gen_ai.operation.name": "chat"}

    num_requests: int = options.requests

    def run() -> float:
        began_s = time.thread_time()
        for _ in range(num_requests):
            metrics.finished(times, 20, attributes, None)
        spent_s: float = time.thread_time() - began_s
        return spent_s / num_requests

    print(f"{min(run() for _ in range(options.repeats)) * 1e6:.1f} us of CPU time a request")


if __name__ == "__main__":
    main()
