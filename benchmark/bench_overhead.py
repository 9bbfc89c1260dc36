"""Time of a scheduling pass beside many waiting offline requests: ours and stock SGLang's.

    python benchmark/bench_overhead.py --out benchmark/results/overhead_cpu.json --plot overhead.svg

Every system is a real SGLang scheduler with a small model and the real event loop, in a
process of its own. 32 requests run: 8 online decodes, and offline requests of 64 prompt and
16 to 48 output tokens, so that in most iterations one of them ends and another begins. The
others wait: behind our schedulers in the offline queue, with stock SGLang in its own.

The systems run in turn, some dozens of passes each, again and again, before more requests
are let wait. Timed is ``get_new_batch_prefill``. Ours has SGLang's own build the batch, and
takes finished rows out of the running one, which SGLang would do a moment later; what it
takes beyond that is our overhead, and ``core.plan`` is a part of it. An iteration lasts from
one pass to the next. On a CPU, where one thread does all of this, it is that thread's
CPU time that is measured: what else runs on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from coserve_bench.machine import describe_machine
from sglang_coserve.config import CoserveConfig
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.srt import cpu

RUNNING: Final = 32
ONLINE: Final = 8
ONLINE_OUTPUT_TOKENS: Final = 3000
"""Longer than the benchmark."""

PREFIXES: Final = 100
"""Half of an offline prompt is one of these."""

WARM_UP_PASSES: Final = 8
ANSWER_TIMEOUT_S: Final = 600
TARGET_MS: Final = 0.5


@dataclass(frozen=True)
class System:
    """A scheduler to start; stock SGLang's where ``policy`` is None."""

    policy: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


SYSTEMS: Final = {
    "coserve": System("coserve"),
    "fifo": System("fifo"),
    "stock fcfs": System(),
    "stock priority": System(flags={"enable_priority_scheduling": True}),
    "stock lpm": System(flags={"schedule_policy": "lpm"}),
    "coserve overlap on": System("coserve", {"disable_overlap_schedule": False}),
    "coserve overlap off": System("coserve", {"disable_overlap_schedule": True}),
    "stock overlap on": System(flags={"disable_overlap_schedule": False}),
    "stock overlap off": System(flags={"disable_overlap_schedule": True}),
}
DEFAULT_SYSTEMS: Final = tuple(SYSTEMS)[:5]
"""Those that overlap where SGLang does so by itself."""


@dataclass
class Pass:
    """One scheduling pass."""

    whole_s: float
    stock_s: float
    """Of it, in SGLang's own code; see above."""

    plan_s: float
    """Of it, in ``core.plan``."""

    admits: bool
    iteration_s: float = 0.0


# --- In the process of a system -----------------------------------------------------------


class Engine:
    """A scheduler whose event loop runs for some passes at a time."""

    def __init__(self, system: System, model: Path) -> None:
        self.scheduler = start_scheduler(system, model)
        self._is_stock = system.policy is None
        self._clock_s = time.perf_counter if cpu.has_cuda() else time.thread_time
        self._rng = random.Random(0)
        self._prefixes = [self._tokens(32) for _ in range(PREFIXES)]
        self._num_sent = 0
        self._passes: list[Pass] = []
        self._pass_started_s = self._away_s = 0.0
        self._spent_s: Counter[str] = Counter()
        self._being_timed: set[str] = set()
        self._pending: list[Any] = []
        self._time_passes()
        for _ in range(ONLINE):
            self._send(self._tokens(64), ONLINE_OUTPUT_TOKENS, is_offline=False)

    def fill(self, num_waiting: int) -> float:
        """Let so many offline requests wait; return the seconds that each new one took."""
        missing = max(0, num_waiting - self._num_waiting())
        started_s = self._clock_s()
        for _ in range(missing):
            prompt = self._rng.choice(self._prefixes) + self._tokens(32)
            self._send(prompt, self._rng.randint(16, 48), is_offline=True)
        return (self._clock_s() - started_s) / max(1, missing)

    def run(self, num_waiting: int, num_passes: int, limit_s: float) -> list[Pass]:
        """Run passes, before each of which so many wait; return all but the first ones."""
        first = len(self._passes) + WARM_UP_PASSES
        end_s = time.perf_counter() + limit_s

        def receive() -> list[Any]:
            started_s = self._clock_s()
            if self._pending:
                self.scheduler.result_queue.extend(self._pending)
                self._pending.clear()
            done = len(self._passes) - first
            # Of the last pass nobody sees the end of the iteration.
            self.scheduler.gracefully_exit = done > num_passes or (
                time.perf_counter() > end_s and done > 8
            )
            self.fill(num_waiting)
            self._away_s += self._clock_s() - started_s
            return []

        self.scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        # Under overlap scheduling the last batch's result, which the next loop would forget.
        self._pending = list(getattr(self.scheduler, "result_queue", ()))
        return self._passes[first:-1]

    def _time_passes(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.scheduler import Scheduler

        for kind, name in ((Scheduler, "get_new_batch_prefill"), (ScheduleBatch, "filter_batch")):
            setattr(kind, name, self._timed("stock", getattr(kind, name)))
        core = getattr(self.scheduler, "_core", None)
        if core is not None:
            core.plan = self._timed("plan", core.plan)
        whole = self._timed("whole", self.scheduler.get_new_batch_prefill)

        def one_pass(running_batch: Any) -> Any:
            now_s = self._clock_s()
            if self._passes:
                self._passes[-1].iteration_s = now_s - self._pass_started_s - self._away_s
            self._pass_started_s, self._away_s = now_s, 0.0
            self._spent_s.clear()
            result = whole(running_batch)
            times_s = (self._spent_s[name] for name in ("whole", "stock", "plan"))
            self._passes.append(Pass(*times_s, admits=result.batch_to_run is not None))
            return result

        self.scheduler.get_new_batch_prefill = one_pass

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add what ``function`` takes to a part of the pass; once, if it is called within it."""

        def timed(*arguments: Any, **named: Any) -> Any:
            if part in self._being_timed:
                return function(*arguments, **named)
            self._being_timed.add(part)
            started_s = self._clock_s()
            result = function(*arguments, **named)
            self._spent_s[part] += self._clock_s() - started_s
            self._being_timed.remove(part)
            return result

        return timed

    def _num_waiting(self) -> int:
        if self._is_stock:
            return len(self.scheduler.waiting_queue)
        return int(self.scheduler._num_offline_waiting())

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(10, self.scheduler.model_config.vocab_size), k=count)

    def _send(self, prompt: list[int], output_tokens: int, *, is_offline: bool) -> None:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(
            max_new_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            custom_params={"coserve_class": "offline"} if is_offline else None,
        )
        params.normalize(self.scheduler.tokenizer)
        self._num_sent += 1
        request = TokenizedGenerateReqInput(
            rid=f"request-{self._num_sent}",
            input_text=None,
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            priority=int(not is_offline) if self.scheduler.enable_priority_scheduling else None,
        )
        self.scheduler.process_input_requests([request])


def start_scheduler(system: System, model: Path) -> Any:
    """Return a scheduler with its model loaded, in this process."""
    cpu.set_environment_defaults()
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_coserve.srt.processes import scheduler_class

    settings = {
        "model_path": str(model),
        "max_running_requests": RUNNING,
        "max_total_tokens": 32768,
        "chunked_prefill_size": 512,
        "log_level": "warning",
        **system.flags,
    }
    if not cpu.has_cuda():
        torch.set_num_threads(1)
        cpu.install_replacements()
        settings = {**cpu.FLAG_DEFAULTS, **settings}
    server_args = ServerArgs(**settings)
    kind = Scheduler
    if system.policy is not None:
        server_args._coserve = CoserveConfig(
            offline_policy=system.policy,
            # So long that no offline request is held back: as many run as with stock SGLang.
            slo_ttft_ms=5000.0,
            slo_tpot_ms=2000.0,
            startup_profile_seconds=0.0,
        )
        kind = scheduler_class(server_args)
    publish(server_args, role="scheduler")
    return kind(server_args, PortArgs.init_new(server_args), 0, 0, 0, 0, 0, 0, None)


def serve(connection: Any, system: System, model: Path) -> None:
    """Run the methods of an ``Engine`` that are asked for, until the connection closes."""
    try:
        engine = Engine(system, model)
        connection.send((None, None))
        while True:
            name, arguments = connection.recv()
            connection.send((getattr(engine, name)(*arguments), None))
    except EOFError:
        os._exit(0)
    except BaseException:
        connection.send((None, traceback.format_exc()))
        os._exit(1)


# --- In the process of the benchmark ------------------------------------------------------


class EngineProcess:
    """A process with an ``Engine``; a context that ends it."""

    def __init__(self, system: System, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=serve, args=(remote, system, model), daemon=True)
        self._process.start()
        remote.close()
        self._answer()

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what the engine's method returned."""
        self._connection.send((name, arguments))
        return self._answer()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        if not self._connection.poll(ANSWER_TIMEOUT_S):
            raise SystemExit(f"no answer in {ANSWER_TIMEOUT_S} s")
        result, error = self._connection.recv()
        if error is not None:
            raise SystemExit(error)
        return result


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    console = Console(stderr=True)
    measured: dict[tuple[str, int], list[list[Pass]]] = {}
    arrival_us: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        model = options.model_path or make_small_model(Path(directory) / "model", SmallModelSpec())
        engines = {}
        for name in options.systems:
            system = SYSTEMS[name]
            system = replace(system, flags={**options.settings, **system.flags})
            engines[name] = stack.enter_context(EngineProcess(system, model))
        with Progress(console=console, transient=True) as progress:
            num_steps = len(options.waiting) * len(engines) * (options.rounds + 1)
            bar = progress.add_task("", total=num_steps)
            for num_waiting in options.waiting:
                for name, engine in engines.items():
                    progress.update(bar, description=f"{name}: {num_waiting:,}", advance=1)
                    arrival_us[name, num_waiting] = engine.call("fill", num_waiting) * 1e6
                for _ in range(options.rounds):
                    for name, engine in engines.items():
                        progress.update(bar, description=f"{name}: {num_waiting:,}", advance=1)
                        passes = engine.call("run", num_waiting, options.passes, options.limit_s)
                        measured.setdefault((name, num_waiting), []).append(passes)
    rows = [
        {**summary(name, num_waiting, rounds), "arrival_us": arrival_us[name, num_waiting]}
        for (name, num_waiting), rounds in sorted(
            measured.items(), key=lambda item: (options.systems.index(item[0][0]), item[0][1])
        )
    ]
    print_table(rows)
    if options.out:
        names = ("rounds", "passes", "limit_s", "settings")
        settings = {name: vars(options)[name] for name in names}
        settings["model_path"] = options.model_path and str(options.model_path)
        document = {"machine": describe_machine(), "settings": settings, "rows": rows}
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot:
        draw(rows, options.plot)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=list(DEFAULT_SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--waiting", nargs="+", type=int, default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=100, help="of a system in a round")
    parser.add_argument("--limit-s", type=float, default=10.0, help="for them; at least 8 are made")
    parser.add_argument("--model-path", type=Path, help="default: a small random model")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="ServerArgs of every system"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, help="draw them (.svg, .png, .pdf)")
    return parser.parse_args()


def summary(name: str, num_waiting: int, rounds: list[list[Pass]]) -> dict[str, Any]:
    """Return the figures of one system; times in ms, the spread over the rounds' medians."""
    passes = [one for passes in rounds for one in passes]
    parts = {"pass": [p.whole_s for p in passes], "iteration": [p.iteration_s for p in passes]}
    if SYSTEMS[name].policy is not None:
        parts["overhead"] = [p.whole_s - p.stock_s for p in passes]
    if any(p.plan_s for p in passes):
        parts["plan"] = [p.plan_s for p in passes]
    added = parts.get("overhead", parts["pass"])
    round_medians = [float(np.median([p.whole_s for p in one])) * 1e3 for one in rounds]
    return {
        "system": name,
        "waiting": num_waiting,
        "passes": len(passes),
        "admitting": sum(p.admits for p in passes),
        **{f"{part}_ms": statistics_ms(times_s) for part, times_s in parts.items()},
        "round_medians_ms": round_medians,
        "share": sum(added) / sum(parts["iteration"]),
    }


def statistics_ms(times_s: list[float]) -> dict[str, float]:
    """Return the median, the P99 and the mean."""
    times_ms = np.array(times_s) * 1e3
    return {
        "median": float(np.median(times_ms)),
        "p99": float(np.percentile(times_ms, 99)),
        "mean": float(times_ms.mean()),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the figures in ms, the share in percent."""
    table = Table(title=f"Scheduling pass, ms; {RUNNING} requests run")
    headings = ["system", "waiting", "passes", "median", "P99", "mean", "ours: median", "P99"]
    for heading in [*headings, "mean", "plan", "iteration", "share %"]:
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for row in rows:
        whole, ours = row["pass_ms"], row.get("overhead_ms")
        names = ("median", "p99", "mean")
        table.add_row(
            row["system"],
            f"{row['waiting']:,}",
            str(row["passes"]),
            *(f"{whole[name]:.3f}" for name in names),
            *(f"{ours[name]:.3f}" if ours else "" for name in names),
            f"{row['plan_ms']['median']:.3f}" if "plan_ms" in row else "",
            f"{row['iteration_ms']['median']:.1f}",
            f"{100 * row['share']:.2f}",
        )
    Console(width=140).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what grows with the number of waiting requests, and what does not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == name]
        part = "overhead_ms" if "overhead_ms" in own[0] else "pass_ms"
        label = f"{name}: beyond SGLang's own pass" if part == "overhead_ms" else name
        waiting = [row["waiting"] for row in own]
        (line,) = axes.plot(waiting, [row[part]["mean"] for row in own], marker="o", label=label)
        for statistic, style in (("median", "--"), ("p99", ":")):
            values = [row[part][statistic] for row in own]
            axes.plot(waiting, values, style, color=line.get_color(), linewidth=0.8)
    axes.axhline(TARGET_MS, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="waiting offline requests",
        ylabel="scheduling pass (ms): mean, -- median, ·· P99",
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
