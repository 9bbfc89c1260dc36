"""One load on an engine emulated and simulated, and a small one on a real engine, too.

    python benchmark/bench_agreement.py --traces TRACES --out benchmark/results/agreement.json

Llama-3.1-8B on an H100, beside Azure's conversations: host work takes no time in either, so that
what differs is how the simulator models an engine. Then a small model on the CPU, beside Poisson
arrivals: real; emulated by the latency model that the real engine has in the end; and simulated by
it, with planning that takes as long as on the real one. Simulations are repeated with other noise.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.own_process import OwnProcess
from common.results import write_results
from interference_bench.engine import CPU_SETTINGS, WARM_UP_S, CpuClockEngine, RunOutcome
from interference_bench.load import TRAFFIC, Load
from interference_bench.session import MODEL
from interference_bench.systems import EngineSystem
from interference_bench.traces import CONTEXT_TOKENS, traffic_of
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.latency_model import LatencyModel, LatencyProfile
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import ConfigError
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.simulator import (
    ExecutorConfig,
    SafepointConfig,
    SimulationSetup,
    Workload,
    simulate,
)
from sglang_coserve.simulator.assemble import offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.small_model import make_small_model
from sglang_coserve.srt.emulation.model_directory import (
    flag_defaults,
    make_emulated_model,
    set_environment_defaults,
)
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.tables import markdown_table
from sglang_coserve.workload import TraceRequest

FIGURES: Final = ("TTFT P50, ms", "TTFT P99, ms", "ITL P50, ms", "ITL P99, ms", "offline tokens/s")
_VOCABULARY: Final = 2048
_SIMULATIONS: Final = 5
_GPU_SLOS: Final = ("ttft p99 <= 500ms", "tbt p99 <= 50ms")
_CPU_SLOS: Final = ("ttft p99 <= 150ms", "tbt p99 <= 60ms")
_CPU_LIMITS: Final[Mapping[str, Any]] = {
    **CPU_SETTINGS,
    "max_total_tokens": 65_536,
    "max_running_requests": 64,
}
_CPU_NOISE: Final = 0.03

Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and the engine that it is given."""

    name: str
    load: Load
    slos: Sequence[str]
    limits: Mapping[str, Any]
    """Fields of ``ServerArgs``, which the simulated engine has, too."""

    layers: int
    noise: float
    has_overlap: bool

    @contextmanager
    def engine(self, model: Path, core: int, host_factor: float) -> Iterator[OwnProcess]:
        """Start the engine."""
        system = EngineSystem(coserve={"offline_policy": "coserve", "slo": tuple(self.slos)})
        with OwnProcess(
            CpuClockEngine,
            system,
            model,
            core,
            {},
            host_factor,
            dict(self.limits),
            preloaded=("sglang.srt.managers.scheduler",),
        ) as engine:
            yield engine

    def simulated(self, model: LatencyModel, planning_s: float, seed: int) -> Values:
        """Return the figures of a simulation."""
        load = self.load
        online = [
            TraceRequest(n, WARM_UP_S + one.at_s, len(one.prompt), one.output_tokens)
            for n, one in enumerate(load.online(_VOCABULARY))
        ]
        lengths = f"{load.offline_prompt_tokens}x{load.offline_output_tokens}"
        end_s = WARM_UP_S + load.seconds
        workload = Workload(
            online=partial(from_trace, online, RequestClass.ONLINE),
            offline=offline_requests(lengths, max_context_tokens=CONTEXT_TOKENS),
            backlog_depth=load.offline_in_flight,
            is_closed_loop=True,
            interval_s=end_s,
        )
        executor = ExecutorConfig(
            kv_capacity_tokens=self.limits["max_total_tokens"],
            page_tokens=1,
            max_running_requests=self.limits["max_running_requests"],
            max_batch_tokens=self.limits["chunked_prefill_size"],
            safepoint=SafepointConfig(self.layers),
            overlap=self.has_overlap,
            scheduling_s=planning_s,
            noise_cv=self.noise,
            seed=seed,
        )
        setup = SimulationSetup(model, executor, slos=tuple(map(parse_slo, self.slos)))
        result = simulate(workload, setup, make_policy("coserve"))
        tokens = 0
        for timeline in result.offline:
            times_s = timeline.token_times_s
            tokens += sum(WARM_UP_S <= at_s < end_s for at_s in times_s)
            if times_s and WARM_UP_S <= times_s[0] < end_s:
                tokens += timeline.prompt_tokens
        ttft_s = [one.token_times_s[0] - one.arrival_s for one in result.online]
        gaps_s = [gap for one in result.online for gap in np.diff(one.token_times_s)]
        return _values(ttft_s, gaps_s, tokens / load.seconds)


def main() -> None:
    """Run both cases; print the table, write the figures."""
    options = parse_options()
    cases: dict[str, dict[str, Any]] = {}
    set_environment_defaults()  # SGLang reads it when it is imported.
    with terminate_as_interrupt(), tempfile.TemporaryDirectory() as folder:
        for name, run in (("gpu", on_gpu), ("cpu", on_cpu)):
            try:
                cases[name] = run(options, Path(folder))
            except ConfigError as error:
                print(f"left out: {error}")
                continue
            write_results(options.out, options, cases=cases)
    print(table(cases))


def on_gpu(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare emulated and simulated at the scale of a GPU."""
    emulation = Emulation.of("llama-3.1-8b", "h100")
    traffic = traffic_of("azure-conversation", options.traces)
    load = Load(traffic, options.gpu_rate, options.gpu_seconds, 0, 2048, 128, 200)
    limits = flag_defaults(emulation)
    case = Case("gpu", load, _GPU_SLOS, limits, emulation.num_layers, emulation.noise, True)
    context = CONTEXT_TOKENS
    model = make_emulated_model(folder / "gpu", emulation, vocab=_VOCABULARY, context=context)
    with case.engine(model, options.core, 0.0) as engine:
        emulated: RunOutcome = engine.call("run", load)
    return {
        "emulated": of_outcome(emulated),
        "simulated": simulations(case, emulation.latency_model(), 0.0),
        "online": len(emulated.requests),
    }


def on_cpu(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare a real engine, the same one emulated, and simulated."""
    load = Load(TRAFFIC["outputs"], options.cpu_rate, options.cpu_seconds, 0, 512, 32, 16)
    case = Case("cpu", load, _CPU_SLOS, _CPU_LIMITS, MODEL.layers, _CPU_NOISE, False)
    with case.engine(make_small_model(folder / "real", MODEL), options.core, 1.0) as engine:
        real: RunOutcome = engine.call("run", load)
        known: LatencyModel = engine.call("latency_model")
    profile = LatencyProfile(known, None, "cpu", "small", 1, "")
    emulation = Emulation.of("llama-3.1-8b", "h100", latency=profile, noise=_CPU_NOISE)
    model = make_emulated_model(
        folder / "cpu", emulation, vocab=_VOCABULARY, context=CONTEXT_TOKENS
    )
    in_series = replace(case, layers=emulation.num_layers)
    with in_series.engine(model, options.core, 1.0) as engine:
        emulated: RunOutcome = engine.call("run", load)
    planning_s = (real.host_s - real.busy_s) / real.num_steps
    return {
        "real": of_outcome(real),
        "emulated": of_outcome(emulated),
        "simulated": simulations(case, known, planning_s),
        "planning_ms": 1e3 * planning_s,
        "online": len(real.requests),
    }


def simulations(case: Case, model: LatencyModel, planning_s: float) -> dict[str, list[float]]:
    """Return the median, the lowest and the highest of each figure."""
    runs = np.array([case.simulated(model, planning_s, seed) for seed in range(_SIMULATIONS)])
    return {
        "median": np.median(runs, axis=0).tolist(),
        "lowest": runs.min(axis=0).tolist(),
        "highest": runs.max(axis=0).tolist(),
    }


def of_outcome(outcome: RunOutcome) -> list[float]:
    """Return the figures of an engine's run."""
    per_s = outcome.offline_tokens / outcome.seconds
    return list(_values(outcome.ttft_s, outcome.gaps_s, per_s))


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table; differences are to the simulation's median."""
    names = {"gpu": "8B on an H100", "cpu": "small model on the CPU"}
    lines = []
    for case, found in cases.items():
        simulated = found["simulated"]
        for place, figure in enumerate(FIGURES):
            low, middle, high = (simulated[key][place] for key in ("lowest", "median", "highest"))
            cells = [f"{middle:,.1f} ({low:,.1f}–{high:,.1f})"]
            for kind in ("emulated", "real"):
                if kind in found:
                    value = found[kind][place]
                    cells += [f"{value:,.1f}", f"{middle / value - 1:+.0%}"]
                else:
                    cells += ["–", "–"]
            lines.append([names[case], figure, *cells])
    columns = ["engine", "figure", "simulated (range)", "emulated", "off by", "real", "off by"]
    return markdown_table(columns, lines)


def _values(ttft_s: Sequence[float], gaps_s: Sequence[float], per_s: float) -> Values:
    ttft, itl = ((1e3 * np.percentile(each, [50, 99])).tolist() for each in (ttft_s, gaps_s))
    return (*ttft, *itl, per_s)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--traces", type=Path, default=Path("traces"), help="folder of the traces")
    add("--gpu-rate", type=float, default=8.0, help="online requests a second")
    add("--gpu-seconds", type=float, default=40.0, help="emulated and simulated")
    add("--cpu-rate", type=float, default=1.5, help="online requests a second")
    add("--cpu-seconds", type=float, default=60.0, help="of CPU time")
    add("--core", type=int, default=0, help="all engines run on this one")
    add("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
