"""Runs the systems in turn, each on a server of its own; the result as a table and as JSON."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

from sglang_coserve import __version__, durable_files
from sglang_coserve.bench_serving import stock
from sglang_coserve.bench_serving.one_run import Figures, Loads, measure
from sglang_coserve.bench_serving.options import ALONE, Options, tuned_stock
from sglang_coserve.demo.servers import System, make_server, module_of
from sglang_coserve.errors import ServerError, StartupError, path_errors
from sglang_coserve.metrics import SloTargets
from sglang_coserve.profiler.fits import attention_name
from sglang_coserve.terminal import markdown_table, median_and_range

_MAX_NAME_CHARS: Final = 100
"""A file system allows 255 bytes."""

_RUN: Final = "run.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. On a started server equal plans are not run twice. As in JSON: no tuples."""

    system: str
    """Its name, with the flags that were given or found for it."""

    command: list[str]
    """Of the server; its address where it ran already."""

    targets_ms: dict[str, float | None]
    online: list[str]
    offline: list[str]
    warmup_s: float
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Repeat:
    """What came of a plan, once."""

    plan: Plan
    figures: Figures
    reports: Mapping[str, Any]
    """SGLang's, of both loads."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a plan."""

    repeats: Sequence[Repeat]
    """At least one."""

    @property
    def plan(self) -> Plan:
        """That of all repeats."""
        return self.repeats[0].plan

    @property
    def figures(self) -> Figures:
        """Those of all repeats together."""
        return Figures.of_repeats([repeat.figures for repeat in self.repeats])

    @property
    def attention_backend(self) -> str:
        """The server's attention backend in effect, as ``attention_name`` has it."""
        return attention_name(self.repeats[0].reports.get("online", {}).get("backends", {}))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        repeats = [{"figures": asdict(one.figures), "reports": one.reports} for one in self.repeats]
        return {"plan": asdict(self.plan), "figures": asdict(self.figures), "repeats": repeats}


class Comparison:
    """Every run, but for those that an earlier command made on servers of its own."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self.targets = options.targets
        """What is promised: given, or from the run of online requests alone once it is there."""

        self.runs: dict[str, Run] = {}
        """By system, in the order in which they are shown."""

        self.tried: dict[str, Run] = {}
        """Settings of stock SGLang that were tried, by system with its flags."""

        self.failed: dict[str, str] = {}
        """Systems without a result, and why."""

    @path_errors()
    def run(self) -> None:
        """Make all runs. A system that fails costs its own row, and those that need its figures."""
        systems = self._options.systems
        # Last what needs the others' figures: alone comes first in the options.
        for system in sorted(systems, key=lambda system: system.is_searched):
            try:
                if system.is_searched:
                    self.runs[system.name] = self._search(system)
                else:
                    self.runs[system.name] = self._run(system)
                scale = self._options.slo_scale
                if system.name == ALONE and scale is not None:
                    alone = self.runs[ALONE].figures
                    self.targets = SloTargets.of_ms(
                        scale * alone.p99_ttft_ms, scale * alone.p99_itl_ms
                    )
            except (ServerError, StartupError) as error:
                self.failed[system.name] = str(error)
        order = [system.name for system in systems]
        self.runs = dict(sorted(self.runs.items(), key=lambda run: order.index(run[0])))

    def _search(self, searched: System) -> Run:
        """Return the run of the setting of stock SGLang that counts: see ``stock``.

        Raises:
            ServerError: none of the settings gave a result.
        """

        def measure_setting(settings: Mapping[str, Any]) -> stock.Candidate | None:
            system = tuned_stock(searched, settings)
            try:
                run = self._run(system)
            except (ServerError, StartupError) as error:
                self.failed[system.name] = str(error)
                return None
            self.tried[system.name] = run
            return run.figures.p99_ttft_ms, run.figures.offline_tokens_per_s or 0.0

        ours = [
            run.figures.offline_tokens_per_s or 0.0
            for name, run in self.runs.items()
            if name.startswith("coserve")
        ]
        best = stock.search(measure_setting, self._options.chunk_tokens, max(ours, default=0.0))
        if best is None:
            raise ServerError(f"no setting of {searched.name} gave a result")
        return self.tried[tuned_stock(searched, best).name]

    def _run(self, system: System) -> Run:
        options = self._options
        if system.takes_slo and self.targets == SloTargets():
            raise ServerError(f"no targets for {system.name}: the run of {ALONE!r} failed")
        flags = ["--model-path", options.model_path or "", *options.server]
        flags += system.server_flags(self.targets)
        url = options.urls.get(system.name)
        plan = Plan(
            system=system.name,
            command=[url]
            if url
            else ["python", "-m", module_of(flags, is_ours=system.is_ours), *flags],
            targets_ms=dict(zip(("ttft", "tpot"), self.targets.in_ms(), strict=True)),
            online=list(options.online),
            offline=list(options.offline),
            warmup_s=options.warmup_s,
            versions=_versions(),
        )
        folder = options.out / "runs" / folder_name(system.name)
        folders = {number: folder / str(number) for number in range(1, options.repeats + 1)}
        missing = [number for number, own in folders.items() if url or _read(own, plan) is None]
        if missing:
            folder.mkdir(parents=True, exist_ok=True)
            self._say(f"{system.name}: starting the server")
            self._measure(system, flags, plan, {number: folders[number] for number in missing})
        found = [_read(own, plan) for own in folders.values()]
        return Run([repeat for repeat in found if repeat is not None])

    def _measure(
        self, system: System, flags: Sequence[str], plan: Plan, folders: Mapping[int, Path]
    ) -> None:
        """Measure each missing repeat, given with its folder, on one server."""
        options = self._options
        server: AbstractContextManager[object] = nullcontext()
        base_url = options.urls.get(system.name)
        if base_url is None:
            own = make_server(
                flags,
                is_ours=system.is_ours,
                log_path=options.out / "runs" / folder_name(system.name) / "server.log",
                ready_timeout_s=options.ready_timeout_s,
            )
            server, base_url = own, own.base_url
        loads_of = partial(Loads, base_url, system, options)
        with ExitStack() as stack:
            early: dict[int, Loads] = {}
            if options.make_requests_early:
                number, folder = next(iter(folders.items()))
                early[number] = stack.enter_context(loads_of(folder, number))
            stack.enter_context(server)
            for number, folder in folders.items():
                with early.get(number) or loads_of(folder, number) as loads:
                    self._repeat(loads, plan, number, folder)

    def _repeat(self, loads: Loads, plan: Plan, number: int, folder: Path) -> None:
        """Measure once, and write the result to a folder."""
        repeats = self._options.repeats
        of_all = f" ({number} of {repeats})" if repeats > 1 else ""
        figures, reports = measure(
            loads,
            self.targets,
            self._options,
            lambda phase: self._say(f"{plan.system}{of_all}: {phase}"),
        )
        content = json.dumps(asdict(Repeat(plan, figures, reports)), indent=1) + "\n"
        path = folder / _RUN
        durable_files.replace(path, lambda file: file.write(content.encode()), mode=0o666)


def _read(folder: Path, plan: Plan) -> Repeat | None:
    """Return what an earlier run wrote; None if there is none, or it had another plan."""
    path = folder / _RUN
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    if found["plan"] != asdict(plan):
        return None
    return Repeat(plan, Figures(**found["figures"]), found["reports"])


def folder_name(system: str) -> str:
    """Return a name for the folder of a system: short, and another one for each system."""
    name = "".join(char if char.isalnum() or char in "-_." else "_" for char in system)
    digest = hashlib.sha256(system.encode()).hexdigest()[:8]
    return name if name == system else f"{name[:_MAX_NAME_CHARS]}-{digest}"


def _versions() -> dict[str, str]:
    return {"sglang_coserve": __version__, "sglang": importlib.metadata.version("sglang")}


_COLUMNS: Final = (
    "system",
    "P50 TTFT ms",
    "P99 TTFT ms",
    "÷ alone",
    "P99 ITL ms",
    "÷ alone",
    "mean TPOT ms",
    "in SLO",
    "goodput /s",
    "offline tokens/s",
    "÷ best stock",
    "failed",
)


def table(comparison: Comparison) -> str:
    """Return a Markdown table with a row for each system, and what is to be known beside it."""
    return "\n".join((_table(comparison), "", *_notes(comparison)))


@path_errors()
def write(comparison: Comparison, out: Path, argv: Sequence[str]) -> None:
    """Write ``table.md`` and ``results.json``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table(comparison) + "\n")
    record = {
        "command": ["python", "-m", "sglang_coserve.bench_serving", *argv],
        **_versions(),
        "attention_backend": _attention_text(comparison),
        "systems": {name: run.to_dict() for name, run in comparison.runs.items()},
        "tried": {name: run.to_dict() for name, run in comparison.tried.items()},
        "failed": comparison.failed,
    }
    (out / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _table(comparison: Comparison) -> str:
    alone = comparison.runs.get(ALONE)
    best_stock = max(
        (
            run.figures.offline_tokens_per_s or 0.0
            for run in (*comparison.runs.values(), *comparison.tried.values())
            if run.plan.system.startswith("stock")
        ),
        default=0.0,
    )
    rows = [_row(name, run, alone, best_stock) for name, run in comparison.runs.items()]
    return markdown_table(_COLUMNS, rows, equal_widths=True)


def _row(name: str, run: Run, alone: Run | None, best_stock: float) -> list[str]:
    figures = run.figures
    found = {f.name: [getattr(r.figures, f.name) for r in run.repeats] for f in fields(Figures)}

    def ratio(latency: str) -> str:
        bases = [] if alone is None else [getattr(r.figures, latency) for r in alone.repeats]
        if not all(bases) or len(bases) != len(found[latency]):
            return "–"
        # Repeats of the same number have the same requests.
        return _cell(
            [one / base for one, base in zip(found[latency], bases, strict=True)], "{:.2f}"
        )

    offline = found["offline_tokens_per_s"]
    of_best = [value / best_stock for value in offline if value is not None and best_stock]
    return [
        name + (" *" if figures.offline_ran_out else ""),
        _cell(found["median_ttft_ms"], "{:.1f}"),
        _cell(found["p99_ttft_ms"], "{:.1f}"),
        ratio("p99_ttft_ms"),
        _cell(found["p99_itl_ms"], "{:.1f}"),
        ratio("p99_itl_ms"),
        _cell(found["mean_tpot_ms"], "{:.1f}"),
        _cell(found["slo_attainment"], "{:.1%}"),
        _cell(found["request_goodput"], "{:.2f}"),
        _cell(offline, "{:,.0f}"),
        _cell(of_best, "{:.2f}"),
        str(figures.online_failed + (figures.offline_failed or 0)),
    ]


def _cell(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return median_and_range(known, form) if known else "–"


def _attention_text(comparison: Comparison) -> str:
    """Name the attention backend of all systems; where they differ, each system's."""
    found = {name: run.attention_backend for name, run in comparison.runs.items()}
    if len(set(found.values())) <= 1:
        return next(iter(found.values()), "")
    return ", ".join(f"{backend or 'unknown'} ({name})" for name, backend in found.items())


def _notes(comparison: Comparison) -> Iterator[str]:
    yield (
        "Online latencies as SGLang's bench_serving has them; offline tokens/s: prompts and "
        "outputs, while the online load ran.\n"
    )
    if attention := _attention_text(comparison):
        yield f"SGLang's attention backend in effect: {attention}.\n"
    repeats = max((len(run.repeats) for run in comparison.runs.values()), default=1)
    if repeats > 1:
        yield f"Medians of {repeats} repeats (lowest–highest).\n"
    if comparison.targets != SloTargets():
        targets = comparison.targets
        parts = (("TTFT", targets.ttft_s), ("TPOT", targets.tpot_s))
        said = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in parts if s is not None)
        yield f"SLO: {said}.\n"
    for name, run in comparison.runs.items():
        if run.plan.system != name:
            setting = run.plan.system.removeprefix(name).strip()
            yield f"{name}: {setting}, the best of {len(comparison.tried)} settings.\n"
    ran_out = [name for name, run in comparison.runs.items() if run.figures.offline_ran_out]
    if ran_out:
        yield (
            f"* The offline load ended before the online one ({', '.join(ran_out)}): its tokens/s "
            "are those of a shorter load. Give --offline a larger --num-prompts.\n"
        )
