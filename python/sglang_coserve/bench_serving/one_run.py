"""Both loads on one server: the offline one alone, the online one beside it, the figures."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import httpx2

from sglang_coserve.bench_serving.load import LoadProcess, LoadResult, with_body
from sglang_coserve.bench_serving.options import Options
from sglang_coserve.demo.servers import System
from sglang_coserve.errors import ServerError
from sglang_coserve.metrics import (
    Outcome,
    SloTargets,
    attainment,
    goodput_per_s,
    latency_report,
    throughput,
)
from sglang_coserve.profiler.fits import ATTENTION_SETTINGS

_IDLE_TIMEOUT_S: Final = 60.0
_FIRST_REQUEST: Final = {
    "input_ids": list(range(10, 522)),
    "sampling_params": {"max_new_tokens": 8, "temperature": 0.0},
}
_SEED: Final = 42
"""bench_serving's own."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run gave, the names of SGLang's report where it has them. None: there is none."""

    median_ttft_ms: float
    p99_ttft_ms: float
    p99_itl_ms: float
    mean_tpot_ms: float
    online_failed: int
    slo_attainment: float | None = None
    """Share of the online requests that met both targets..."""

    request_goodput: float | None = None
    """...and how many did each second. None: there are no targets."""

    offline_failed: int | None = None
    offline_tokens_per_s: float | None = None
    """Prompt and output tokens while the online load ran: docs/metrics.md."""

    offline_ran_out: bool = False
    """The offline load ended before the online one: the figures say less of the server."""

    @classmethod
    def of_repeats(cls, repeats: Sequence[Figures]) -> Figures:
        """Return the median of each figure; of failures the sum, and whether any load ran out."""

        def of_all(name: str) -> Any:
            values = [getattr(one, name) for one in repeats]
            if name == "offline_ran_out":
                return any(values)
            if None in values:
                return None
            return sum(values) if name.endswith("_failed") else statistics.median(values)

        return cls(**{field.name: of_all(field.name) for field in fields(cls)})


class Loads:
    """The processes of both loads of one repeat; a context manager, which ends them.

    They make their requests at once and wait, so the server need not run yet.
    """

    def __init__(
        self, base_url: str, system: System, options: Options, folder: Path, repeat: int
    ) -> None:
        """Start the processes.

        Loads without a ``--seed`` get one by ``repeat``, from 1 on: equal ones would make equal
        prompts, hence hits in the prefix cache.

        Raises:
            ConfigError: a load's ``--extra-request-body`` cannot be used.
        """
        self.base_url = base_url
        # bench_serving would wait for the server before it makes the requests, and give up.
        common = ["--ready-check-timeout-sec", "0"]
        common += ["--concurrency-ratio", str(options.steady_state_concurrency_ratio)]
        # bench_serving would send the first request twice, and the cache would answer the second.
        common += ["--warmup-requests", "0"]
        if options.model_path is not None:
            # It would look the served name up on Hugging Face, and retry where there is no network.
            common += ["--model", options.model_path]
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:

            def load(name: str, flags: list[str], body: Mapping[str, Any]) -> LoadProcess:
                words = [*common, *with_body(flags, body)]
                return stack.enter_context(LoadProcess(name, base_url, words, folder))

            seed = _SEED + 2 * (repeat - 1)
            self.online = load("online", ["--seed", str(seed), *options.online], system.online_body)
            self.offline: LoadProcess | None = None
            if system.has_offline:
                offline_flags = ["--seed", str(seed + 1), *options.offline]
                self.offline = load("offline", offline_flags, system.offline_body)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def measure(
    loads: Loads, targets: SloTargets, options: Options, say: Callable[[str], None]
) -> tuple[Figures, dict[str, Any]]:
    """Run both loads on a server that runs; return the figures, and SGLang's reports.

    Raises:
        ServerError: a load failed or took longer than ``--run-timeout-s``.
    """
    limit_s = options.run_timeout_s
    make_ready(loads.base_url, limit_s)
    online, offline = loads.online, loads.offline
    say("making requests")
    if offline is not None:
        offline.wait_for("ready", limit_s)
    online.wait_for("ready", limit_s)
    if offline is not None:
        say("offline load alone")
        offline.go()
        offline.wait_for("answered", limit_s)
        time.sleep(options.warmup_s)
    say("both loads" if offline is not None else "online load")
    online.go()
    found = online.result(limit_s)
    if offline is None:
        return _figures(targets, found), {"online": _record(found), "offline": None}
    say("last offline answers")
    offline.end()
    beside = offline.result(limit_s)
    figures = _figures(targets, found, beside)
    return figures, {"online": _record(found), "offline": _record(beside)}


def make_ready(base_url: str, limit_s: float) -> None:
    """Have kernels compiled, every prompt computed, and no full garbage collection in a run.

    On a GPU the first prompt that continues a cached one waits for ten seconds of compilation. A
    collection takes a third of a second after SGLang's imports. Each would be all that a P99 shows.

    Raises:
        ServerError: the server does not answer, or does not become idle.
    """
    key = os.environ.get("OPENAI_API_KEY")  # As bench_serving has it.
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        verify = httpx2.create_ssl_context()  # By the environment; its proxies do not count.
        with httpx2.Client(
            base_url=base_url, headers=headers, verify=verify, trust_env=False
        ) as client:
            timeout_s = 2 * _IDLE_TIMEOUT_S
            for _ in range(2):  # The second continues the first.
                client.post("/generate", json=_FIRST_REQUEST, timeout=limit_s)
            emptied = client.post(
                "/flush_cache", params={"timeout": _IDLE_TIMEOUT_S}, timeout=timeout_s
            )
            client.post("/freeze_gc", timeout=timeout_s)
    except httpx2.HTTPError as error:
        raise ServerError(f"{base_url} does not answer: {error}") from error
    if emptied.status_code != 200:
        raise ServerError(
            f"{base_url} did not empty its cache (HTTP {emptied.status_code}: "
            f"{emptied.text.strip()[:200]}): it must be idle before a run"
        )


def _figures(targets: SloTargets, online: LoadResult, offline: LoadResult | None = None) -> Figures:
    report = online.report
    figures: dict[str, Any] = {
        name: report[name]
        for name in ("median_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "mean_tpot_ms")
    }
    figures["online_failed"] = _failed(online)
    interval = online.began_s, online.ended_s
    if targets != SloTargets():
        figures |= {
            "slo_attainment": attainment(online.timelines, targets),
            "request_goodput": goodput_per_s(online.timelines, targets, *interval),
        }
    if offline is not None:
        during = throughput(offline.timelines, *interval)
        figures |= {
            "offline_failed": _failed(offline),
            "offline_tokens_per_s": during.total_tokens_per_s,
            "offline_ran_out": offline.unsent == 0 and offline.ended_s < online.ended_s,
        }
    return Figures(**figures)


def _failed(load: LoadResult) -> int:
    return sum(timeline.outcome is Outcome.FAILED for timeline in load.timelines)


def _record(load: LoadResult) -> dict[str, Any]:
    """Return SGLang's report, the same latencies by our definitions, and the server's own words:
    its backends in effect, and the status of our schedulers."""
    server = load.report.get("server_info") or {}
    states = server.get("internal_states") or ()
    return {
        "bench_serving": {
            # An infinite rate is no JSON.
            name: str(value) if value == math.inf else value
            for name, value in load.report.items()
            if name != "server_info"
        },
        "steady_state": load.steady_state,
        "began_s": load.began_s,
        "ended_s": load.ended_s,
        "unsent": load.unsent,
        "latencies": latency_report(load.timelines).to_dict(),
        "backends": {name: server.get(name) for name in (*ATTENTION_SETTINGS, "sampling_backend")},
        "coserve": [state["coserve"] for state in states if "coserve" in state],
    }
