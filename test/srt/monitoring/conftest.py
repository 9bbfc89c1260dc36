"""One server under load for the tests of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_coserve.small_model import SmallModelSpec, make_small_model
from srt.monitoring.otlp_collector import Collector, collecting
from srt.monitoring.watched import Watched, served


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Watched]:
    """It exports to Prometheus and over OTLP, suspends steps before any layer, and keeps
    checkpoints."""
    directory = tmp_path_factory.mktemp("watched")
    flags = ("--safepoint-interval", "1", "--kv-checkpoint", "eager", "--enable-trace")
    flags += ("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
    # Layers enough for safepoints between them.
    model = make_small_model(directory / "model", SmallModelSpec(hidden=64, layers=8, context=1024))
    with served(model, directory, *flags, environment=collector.environment) as running:
        yield running
