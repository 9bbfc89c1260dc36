"""Tuned stock SGLang and ours on an emulated GPU, beside traffic of published traces.

    python benchmark/bench_emulated.py --traces TRACES --out benchmark/results/emulated/8b
    python benchmark/bench_emulated.py --model llama-3.1-70b --tp 4 --traces TRACES --out …/70b

Real schedulers run on a virtual clock, on which only the device's steps are modelled: see
docs/emulation.md, which says where the traces come from. Figures are emulated, never measured on a
GPU. A load of 1 is the rate at which requests end that all come at once, by the latency model.

Each load has a file in ``--out``; those that are there are not run again. A command that was ended
goes on after the last system that it ran. ``--plots FILE`` draws what is there. ``--effects`` runs
the papers' headline effects instead, each with its own loads, or a run of a GPU again:

    python benchmark/bench_emulated.py --host-factor 0 --effects bros --out …/effects
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.own_process import OwnProcess
from common.results import claim_folder, settings_of, write_json, write_results
from emulated_bench import effects
from emulated_bench.contenders import ALONE, DEFAULT, PLAIN, STOCK, of_papers, ours, stock_settings
from emulated_bench.effects import EFFECTS
from emulated_bench.figures import bound_per_s, full_rate_per_s, row
from emulated_bench.report import plot, table
from interference_bench.engine import CpuClockEngine
from interference_bench.load import Load, load_parser
from interference_bench.systems import EngineSystem
from interference_bench.traces import CONTEXT_TOKENS, TRACES, TraceTraffic, fit_of, traffic_of
from sglang_coserve.bench_serving.stock import best_setting
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.emulation.model_directory import (
    make_emulated_model,
    set_environment_defaults,
)
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.terminal import terminate_as_interrupt

_RUN_TIMEOUT_S = 3600.0
_AT_ONCE_S = 1e-3
"""In which requests come that shall come at once."""

_SPARE_TOKENS = 768
"""Of the context, that SGLang keeps for itself."""

_PRELOADED = ("sglang.srt.managers.scheduler",)
"""It takes longer to import than most runs take."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """The emulated device, and what it is given."""

    options: argparse.Namespace
    emulation: Emulation
    model: Path

    engines: ExitStack
    of_stock: dict[str, OwnProcess] = field(default_factory=dict)

    def runs(
        self, system: EngineSystem, loads: Sequence[Load], targets: Mapping[str, SloTargets]
    ) -> Iterator[Row]:
        """Yield the figures of loads, one after the other."""
        with self.engine(system) as engine:
            for repeat, load in enumerate(loads):
                outcome = engine.call("run", load, timeout_s=_RUN_TIMEOUT_S)
                yield {"repeat": repeat, **row(outcome, targets)}

    @contextmanager
    def engine(self, system: EngineSystem) -> Iterator[OwnProcess]:
        """Start an engine. Ours remembers traffic, and is for one load; stock SGLang is kept."""
        if system.coserve is not None:
            with self._started(system) as engine:
                yield engine
            return
        key = repr(system)
        if key not in self.of_stock:
            self.of_stock[key] = self.engines.enter_context(self._started(system))
        yield self.of_stock[key]

    def _started(self, system: EngineSystem) -> OwnProcess:
        return OwnProcess(
            CpuClockEngine,
            system,
            self.model,
            self.options.core,
            {},
            self.options.host_factor,
            stops_when_idle=True,
            preloaded=_PRELOADED,
        )


def main() -> None:
    """Run what is missing, and print the table of all."""
    options = parse_options()
    set_environment_defaults()  # SGLang reads it when it is imported.
    if options.effects:
        measure_effects(options)
        return
    emulation = Emulation.of(options.model, options.hardware, tp_size=options.tp)
    claim_folder(options.out / "settings.json", _claimed(options))
    with machine_of(options, emulation) as machine:
        for name in options.traffic:
            try:
                traffic = traffic_of(name, options.traces)
            except ConfigError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            measure(machine, name, traffic)
    loads = [json.loads(path.read_text()) for path in sorted(options.out.glob("*-load-*.json"))]
    print(table(loads))
    if options.plots:
        plot(loads, options.plots)


@contextmanager
def machine_of(options: argparse.Namespace, emulation: Emulation) -> Iterator[Machine]:
    """Make an emulated model, and end its engines at last."""
    with ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        context = CONTEXT_TOKENS + _SPARE_TOKENS
        model = make_emulated_model(folder / "model", emulation, vocab=2048, context=context)
        yield Machine(options, emulation, model, stack)


def measure_effects(options: argparse.Namespace) -> None:
    """Run what is missing of effects of the papers, and print the table of all."""
    for name in options.effects:
        effect, path = EFFECTS[name], options.out / f"{name}.json"
        emulation = effect.emulation()
        loads: dict[str, list[Row]] = json.loads(path.read_text())["loads"] if path.exists() else {}
        with machine_of(options, emulation) as machine:
            for label, load in effect.loads.items():
                rows = loads.setdefault(label, [])
                for system in list(effect.systems)[len(rows) :]:
                    targets = effect.targets_of(rows)
                    judged = {
                        "ttft": SloTargets(ttft_s=targets.ttft_s),
                        "tpot": SloTargets(tpot_s=targets.tpot_s),
                    }
                    engine = effect.system(system, targets)
                    offered = load if engine.has_offline else load.alone()
                    (found,) = machine.runs(engine, [offered], judged)
                    kept = {f"in_{key}": share for key, share in found.pop("attained").items()}
                    rows.append({"system": system, **found, **kept})
                    print(f"{name}, {label}: {_line(rows[-1])}", file=sys.stderr)
                    write_results(path, options, emulated=emulation.name, loads=loads)
    paths = {name: options.out / f"{name}.json" for name in EFFECTS}
    stored = {name: json.loads(p.read_text())["loads"] for name, p in paths.items() if p.exists()}
    print(effects.table(stored))


def measure(machine: Machine, name: str, traffic: TraceTraffic) -> None:
    """Run all loads of a traffic that have no file yet."""
    options = machine.options
    missing = {
        load: path
        for load in options.load
        if not (path := options.out / f"{name}-load-{round(100 * load)}.json").exists()
    }
    if not missing:
        return
    at_once = traffic.requests(options.at_once / _AT_ONCE_S, _AT_ONCE_S, 0)
    full_per_s = full_rate_per_s(machine.emulation, at_once)
    for share, path in missing.items():
        rate_per_s = share * full_per_s
        seconds = max(options.seconds, options.requests / rate_per_s)
        loads = [
            Load(traffic, rate_per_s, seconds, seed).beside(options)
            for seed in range(options.repeats)
        ]
        print(f"{name} at {share:.0%}: {rate_per_s:.2f}/s for {seconds:.0f} s", file=sys.stderr)
        kept = path.with_suffix(".rows")
        rows, targets, best = compared(machine, loads, kept)
        bounds = [
            bound_per_s(
                machine.emulation,
                traffic.requests(load.rate_per_s, load.seconds, load.seed),
                load,
                targets["1.2 × alone"],
            )
            for load in loads
        ]
        write_results(
            path,
            options,
            emulated=machine.emulation.name,
            traffic=name,
            load=share,
            full_rate_per_s=full_per_s,
            rate_per_s=rate_per_s,
            cut_to_context=fit_of(traffic),
            targets_ms={
                kind: [1e3 * (t.ttft_s or 0), 1e3 * (t.tpot_s or 0)] for kind, t in targets.items()
            },
            bound_tokens_per_s=bounds,
            stock_that_counts=best,
            rows=rows,
        )
        kept.unlink()


def compared(
    machine: Machine, loads: Sequence[Load], kept: Path
) -> tuple[list[Row], dict[str, SloTargets], str]:
    """Run all systems; return their rows, the targets, and which setting of stock counts.

    All settings of stock SGLang get the first load; the rest gets the one that counts. ``kept`` is
    a file with the rows so far, so that a command that was ended goes on from there.
    """
    options = machine.options
    rows: list[Row] = json.loads(kept.read_text())["rows"] if kept.exists() else []
    targets: dict[str, SloTargets] = {}

    def run(name: str, system: EngineSystem, some: Sequence[Load], first: int = 0) -> None:
        if not some or any((one["system"], one["repeat"]) == (name, first) for one in rows):
            return
        for one in [*machine.runs(system, some, targets)]:
            rows.append({"system": name, **one, "repeat": first + one["repeat"]})
            print(f"  {_line(rows[-1])}", file=sys.stderr)
        write_json(kept, {"rows": rows})

    run(PLAIN, ALONE, [one.alone() for one in loads])
    ttft_s, gap_s = (
        1.2e-3 * statistics.mean(one[key] for one in rows if one["system"] == PLAIN)
        for key in ("ttft_p99_ms", "itl_p99_ms")
    )
    given = SloTargets(options.ttft_ms / 1e3, options.tpot_ms / 1e3)
    alone = SloTargets(ttft_s, gap_s)
    targets |= {"1.2 × alone": alone, "given": given}
    papers = of_papers(alone) if options.papers else {}
    for name, system in (ours(alone, given) | papers).items():
        run(name, system, loads)
    settings = stock_settings(options.chunks)
    for name, system in settings.items():
        run(name, system, loads[:1])
    at_first = {one["system"]: one for one in rows if one["repeat"] == 0}
    tried = {
        name: (one["ttft_p99_ms"], one["offline_tokens_per_s"])
        for name, one in at_first.items()
        if name.startswith(STOCK)
    }
    best = best_setting(tried, at_first[DEFAULT]["offline_tokens_per_s"])
    run(best, settings[best], loads[1:], first=1)
    return rows, targets, best


def _line(one: Row) -> str:
    return (
        f"{one['system']}: TTFT {one['ttft_p50_ms']:.0f}, {one['ttft_p99_ms']:.0f}, "
        f"ITL {one['itl_p50_ms']:.1f}, {one['itl_p99_ms']:.1f} ms, "
        f"{one['offline_tokens_per_s']:,.0f} offline tokens/s, "
        f"{one['host_ms_per_step']:.1f} ms of host a step"
    )


def _claimed(options: argparse.Namespace) -> Row:
    """Return the settings that all files of a folder share."""
    own = {"traffic", "load", "requests", "traces", "core", "plots", "papers", "effects"}
    return {key: value for key, value in settings_of(options).items() if key not in own}


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = load_parser(__doc__, TRACES)
    parser.set_defaults(
        traffic=[*TRACES],
        repeats=2,
        seconds=30.0,
        offline=[2048, 128],
        in_flight=200,
        ttft_ms=500.0,
        tpot_ms=50.0,
        host_factor=0.5,
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="emulated")
    add("--hardware", default="h100", help="emulated")
    add("--tp", type=int, default=1, help="so many of these devices")
    add("--traces", type=Path, default=Path("traces"), help="folder of the traces")
    add("--requests", type=int, default=300, help="a run has at least so many online ones")
    add("--at-once", type=int, default=1000, help="requests that show what full load is")
    add("--chunks", nargs="+", type=int, default=[512, 1024, 2048], help="tried for stock")
    add("--papers", action="store_true", help="also run the policies of the papers")
    add("--effects", nargs="+", choices=[*EFFECTS], help="run these of the papers, and no traffic")
    add("--plots", type=Path, help="write a picture of all loads in --out")
    add("--out", type=Path, required=True, help="folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
