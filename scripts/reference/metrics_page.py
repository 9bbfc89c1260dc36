"""Writes docs/prometheus.md, the page of all metrics, from those that a process registers.

python scripts/reference/metrics_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client import REGISTRY

from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.fleet.report import GATEWAY_METRICS, Families, fleet_values
from sglang_coserve.srt.monitoring.exporter import SERVER_METRICS, Exporter
from sglang_coserve.srt.monitoring.replica_metrics import REPLICA_METRICS

PAGE: Final = Path(__file__).parents[2] / "docs" / "prometheus.md"

_SERVER: Final = """\
# All metrics

For those who collect metrics: what `/metrics` exports. [Metrics](metrics.md) defines the numbers,
and [docs/examples/monitoring](examples/monitoring/README.md) has Prometheus, Grafana and alerts.
[A script](../scripts/reference/metrics_page.py) makes this page.

## Of a server

With SGLang's `--enable-metrics`, beside SGLang's own; by rank 0 of a replica, at most once a
second. All have the label `model_name`; with `--dp-size` above 1 all but those of batches and of
the HTTP server's tasks also have `dp_rank`.
"""

_GATEWAY: Final = """\
## Of a gateway

[`coserve gateway`](fleet.md) has these, and a server's metrics of batches and background tasks.
"""


def page() -> str:
    """Return the text of the page; once a process, since it registers the metrics."""
    Exporter({**REPLICA_METRICS, **SERVER_METRICS}, {"model_name": "model"})
    registered = [each for each in REGISTRY._collector_to_names if hasattr(each, "_labelnames")]
    server = [(family, each._labelnames) for each in registered for family in each.collect()]
    families: Iterable[Any] = Families(GATEWAY_METRICS, fleet_values(FleetBackend("key"))).collect()
    gateway = [(family, family._labelnames) for family in families]
    return "\n".join(
        (_SERVER, _table("coserve_", server), _GATEWAY, _table("coserve_gateway_", gateway))
    )


def _table(prefix: str, metrics: Iterable[tuple[Any, Sequence[str]]]) -> str:
    rows = ["| metric | |\n|---|---|\n"]
    for family, labels in metrics:
        if family.name.startswith(prefix):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            own = ",".join(label for label in labels if label != "model_name")
            shown = f"{name}{{{own}}}" if own else name
            kind = "Histogram. " if family.type == "histogram" else ""
            text = re.sub(r"(--[a-z-]+[a-z](?: shed)?|/coserve/\w+)", r"`\1`", family.documentation)
            rows.append(f"| `{shown}` | {kind}{text} |\n")
    return "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
