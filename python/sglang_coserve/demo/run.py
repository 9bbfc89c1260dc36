"""Runs the demo: model, servers, both workloads, report."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx2
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sglang_coserve.config.flags import setting
from sglang_coserve.demo.cpu_use import CpuTimes, CpuUse
from sglang_coserve.demo.loads import LoadScale, StreamedLoad, repeated, replayed
from sglang_coserve.demo.result import DemoResult, SystemResult, as_json
from sglang_coserve.demo.servers import (
    ALONE,
    LABELS,
    OURS,
    STOCK,
    System,
    make_server,
    stock_chunk_tokens,
)
from sglang_coserve.demo.timeline import draw
from sglang_coserve.demo.verdict import sentence
from sglang_coserve.errors import ConfigError, InputFileError, path_errors, require
from sglang_coserve.metrics import SloTargets
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.srt.optional_parts import EMULATED, platform_for
from sglang_coserve.srt.platform import Platform
from sglang_coserve.terminal import printable, terminate_as_interrupt
from sglang_coserve.workload.shape import RESERVED_TOKENS, fit_to_context, until
from sglang_coserve.workload.trace import TraceRequest, read_trace, sample_path

# Small enough for two CPU cores to serve both workloads.
_MODEL: Final = SmallModelSpec(hidden=128, layers=2)

_CPU_SCALE: Final = LoadScale(prompts=8.0)
"""Scale of the bundled loads for that model. Shorter prompts show the client and the HTTP server,
which take a core for themselves, instead of the engine."""

# It fits one GPU of each kind that can be emulated.
_EMULATED_MODEL: Final = "llama-3.1-8b"

_COMPARED: Final = ((ALONE, STOCK), (OURS,))
"""Systems in one tuple share a server; each starts with an empty cache."""

_CONCURRENCY: Final = 64
_DRAIN_S: Final = 20.0
_POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run.

    Raises:
        ConfigError: it cannot be run.
    """

    seconds: float = setting(
        60.0, "how long all three windows take together; set-up comes on top", type=float
    )
    quick: bool = setting(False, "ours alone, in a third of the time", action="store_true")
    trace: Path | None = setting(
        None, "online trace: Azure CSV, BurstGPT CSV or Mooncake JSONL", type=Path
    )
    offline: Path | None = setting(
        None, "offline requests: JSONL in OpenAI's batch format", type=Path
    )
    out: Path = setting(Path("demo-report"), "where report.json and timeline.png go", type=Path)
    model: Path | None = setting(
        None, "a model of your own; default: a small random one", type=Path
    )
    emulate: str | None = setting(
        None,
        "at the pace of Llama-3.1-8B on a GPU that is emulated: h100, h200, b200, a100, a40 or "
        "ascend-910c",
        metavar="HARDWARE",
    )
    slo_ttft_ms: float | None = setting(
        None, "online TTFT target of ours, ms; default: its defaults", type=float
    )
    slo_tpot_ms: float | None = setting(None, "online TPOT target of ours, ms", type=float)
    server_flag: Sequence[str] = setting(
        (), "a further flag for our server, as --server-flag=--FLAG; repeatable", action="append"
    )

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"--seconds must be positive, got {self.seconds}")
        if self.emulate is not None and self.model is not None:
            raise ConfigError(
                "--emulate makes the model: remove --model, or --emulate if it is emulated already"
            )

    @property
    def targets(self) -> SloTargets:
        """Of ours; without any it has its defaults."""
        return SloTargets.of_ms(self.slo_ttft_ms, self.slo_tpot_ms)

    @property
    def window_s(self) -> float:
        """How long each system is measured."""
        return self.seconds / sum(map(len, _COMPARED))


@path_errors()
def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Run the demo and write ``report.json`` and ``timeline.png`` into ``options.out``.

    Raises:
        CoserveError: the trace, the file or a server is at fault.
        KeyboardInterrupt: on SIGINT or SIGTERM, after the server has ended.
    """
    require("plot", "timeline.png")  # It is drawn last.
    platform = _platform(options)
    bundled = _scale(platform)
    trace, trace_scale = _given(options.trace, "online", bundled)
    offline, offline_scale = _given(options.offline, "offline", bundled)
    repeated(offline, {}, lines_in_one=offline_scale.lines_in_one)  # What is wrong is told now.
    requests = list(until(trace_scale.applied(read_trace(trace)), options.window_s))
    if not requests:
        raise InputFileError(f"{trace}: no request in the first {options.window_s:g} s")
    options.out.mkdir(parents=True, exist_ok=True)
    with terminate_as_interrupt():
        with console.status("making a model"):
            model = options.model or _make_model(options.out, platform)
        if platform.emulated is not None:
            console.print(
                f"{platform.emulated}: no GPU computes here, and all figures are emulated"
            )
        context_tokens, vocab_size = _limits(model)
        requests, cut = fit_to_context(requests, context_tokens - RESERVED_TOKENS)
        online = f"online: {trace.name}, first {options.window_s:g} s{trace_scale}: {cut}"
        console.print(printable(online), markup=False)
        lines_in_one = offline_scale.lines_in_one
        joined = f", {lines_in_one} lines in one" if lines_in_one > 1 else ""
        lines = f"offline: {offline}{joined}, again and again as long as a window lasts"
        console.print(printable(lines), markup=False)
        groups = ((OURS,),) if options.quick else _COMPARED
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=options.window_s * sum(map(len, groups)))
            measuring = _Run(
                options, model, requests, vocab_size, offline, lines_in_one, progress, task
            )
            results = asyncio.run(measuring.all_of(groups))
    result = DemoResult(tuple(results), options.targets, platform.emulated)
    as_text = json.dumps(as_json(result, sentence(result)), indent=2) + "\n"
    (options.out / "report.json").write_text(as_text)
    draw(result, options.out / "timeline.png")
    return result


@dataclass
class _Run:
    """The servers one after the other, each with the same loads."""

    options: DemoOptions
    model: Path
    requests: Sequence[TraceRequest]
    vocab_size: int
    offline: Path
    lines_in_one: int
    progress: Progress
    task: TaskID
    done_s: float = 0.0
    """Of the windows before this one."""

    async def all_of(self, groups: Sequence[Sequence[System]]) -> list[SystemResult]:
        return [result for group in groups for result in await self._one_server(group)]

    async def _one_server(self, systems: Sequence[System]) -> list[SystemResult]:
        system = systems[0]
        log = self.options.out / ("server.log" if system.is_ours else "stock_server.log")
        server = make_server(self._flags(system), is_ours=system.is_ours, log_path=log)
        server_name = "our server" if system.is_ours else "a stock server"
        self._show(0.0, f"starting {server_name} (log: {log})")
        results = []
        try:
            await asyncio.to_thread(server.start)
            if system.is_ours:
                self.progress.console.print(f"to look at: {server.base_url}/coserve", style="bold")
            for number, each in enumerate(systems):
                if number:
                    await asyncio.to_thread(_empty_cache, server.base_url)
                results.append(await self._measure(each, server.base_url, server.pid))
        finally:
            server.stop()
        return results

    async def _measure(self, system: System, base_url: str, server_pid: int) -> SystemResult:
        """Send both loads until the window is over, the offline one a moment earlier."""
        window_s, label = self.options.window_s, LABELS[system.name]
        online = StreamedLoad(
            base_url,
            replayed(self.requests, vocab_size=self.vocab_size, fields=system.online_body),
            arrivals_s=[request.arrival_s for request in self.requests],
            drain_s=_DRAIN_S,
        )
        async with AsyncExitStack() as stack:
            beside = None
            if system.has_offline:
                lines = repeated(self.offline, system.offline_body, lines_in_one=self.lines_in_one)
                beside = StreamedLoad(base_url, lines, at_once=_CONCURRENCY)
                await stack.enter_async_context(beside)
                self._show(0.0, f"{label}: offline load begins")
                with suppress(TimeoutError):
                    async with asyncio.timeout(window_s):
                        while not beside.num_answered:
                            await asyncio.sleep(_POLL_S)
            async with online:
                elapsed_s, before = 0.0, CpuTimes.read(server_pid)
                while (beside or online.is_running) and elapsed_s < window_s:
                    answered = f"online {online.num_answered}/{len(self.requests)}"
                    more = f", offline {beside.num_answered}" if beside else ""
                    self._show(elapsed_s, f"{label}: {answered}{more}")
                    await asyncio.sleep(_POLL_S)
                    elapsed_s = time.perf_counter() - online.began_s
                cpu = CpuUse.between(before, CpuTimes.read(server_pid), elapsed_s)
                await stack.aclose()
                await online.finished()
        self.done_s += window_s
        return SystemResult(
            system.name,
            label,
            online.timelines(online.began_s),
            None if beside is None else beside.timelines(online.began_s),
            elapsed_s,
            cpu,
        )

    def _show(self, elapsed_s: float, text: str) -> None:
        completed_s = self.done_s + min(elapsed_s, self.options.window_s)
        self.progress.update(self.task, completed=completed_s, description=printable(text))

    def _flags(self, system: System) -> list[str]:
        flags = ["--model-path", str(self.model), "--log-level", "warning"]
        flags += system.server_flags(self.options.targets)
        if system.is_ours:
            return [*flags, *self.options.server_flag]
        return [*flags, "--chunked-prefill-size", str(stock_chunk_tokens(self.model))]


def _platform(options: DemoOptions) -> Platform:
    if options.emulate is not None:
        return EMULATED.imitating(_EMULATED_MODEL, options.emulate)
    return platform_for(options.model)


def _scale(platform: Platform) -> LoadScale:
    if platform.latency_model is None:
        return _CPU_SCALE
    sample = list(read_trace(sample_path("online")))
    chunk_tokens = platform.flags["chunked_prefill_size"]
    return LoadScale.for_device(sample, platform.latency_model, chunk_tokens)


def _given(
    path: Path | None, name: Literal["online", "offline"], bundled: LoadScale
) -> tuple[Path, LoadScale]:
    """Return a load's file and its scale: what the user gives stays as it is."""
    return (sample_path(name), bundled) if path is None else (path, LoadScale())


def _make_model(folder: Path, platform: Platform) -> Path:
    if platform.emulated is None:
        return make_small_model(folder / "model", _MODEL)
    directory = folder / platform.emulated
    platform.make_model(directory, vocab=_MODEL.vocab)
    return directory


def _empty_cache(base_url: str) -> None:
    """Have the next system compute every prompt, as the one before it had to."""
    httpx2.post(f"{base_url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()


def _limits(model: Path) -> tuple[int, int]:
    """Return the context length and the vocabulary size in the model's config.json.

    Raises:
        ConfigError: it has none, as that of a model that is not of text alone.
    """
    path = model / "config.json"
    config = json.loads(path.read_text())
    try:
        return int(config["max_position_embeddings"]), int(config["vocab_size"])
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]}: give --model a model of text") from error
