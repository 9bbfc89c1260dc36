"""Steps that measure one GPU, the most valuable first: command lines of other programs."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu.step_times import SUMMARY, reduce_folder
from sglang_coserve.bench_serving.compare import folder_name
from sglang_coserve.bench_serving.options import ALONE, SYSTEMS, parse_system
from sglang_coserve.demo.servers import System
from sglang_coserve.errors import ConfigError

DRY_RUN_NOTE: Final = (
    "Dry run on a CPU with a tiny model: no figure here says anything about a GPU."
)
_BENCHMARKS: Final = Path(__file__).resolve().parents[1]
_MIXED_TOKENS: Final = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class CoLoadSystem:
    """A system that serves both loads, under the name that ``--coload-systems`` takes."""

    server: str
    """The system as ``--systems`` of bench_serving takes it: NAME[:LABEL] and flags."""

    meaning: str


COLOAD_SYSTEMS: Final[Mapping[str, CoLoadSystem]] = {
    ALONE: CoLoadSystem(ALONE, "stock SGLang with the online load alone; always runs first"),
    "default": CoLoadSystem("coserve:default", "ours by default: --online-slowdown 10%"),
    "targets": CoLoadSystem(
        "coserve-slo:targets", f"ours, with 1.2 times the P99 TTFT and ITL of {ALONE} as targets"
    ),
    "targets-300-40": CoLoadSystem(
        "coserve:targets-300-40 --slo 'ttft p99 <= 300ms' 'tbt p99 <= 40ms'",
        "ours, with 300 ms to the first token and 40 ms between tokens as targets",
    ),
    "stock": CoLoadSystem("stock", "stock SGLang by default: both loads in one queue"),
    "stock-priority": CoLoadSystem("stock-priority", "stock SGLang, online requests first"),
    **{
        f"stock-{tokens}": CoLoadSystem(
            f"stock-priority:mixed-{tokens} --enable-mixed-chunk --chunked-prefill-size {tokens}",
            f"stock-priority, where decodes ride in chunks of {tokens} tokens",
        )
        for tokens in _MIXED_TOKENS
    },
}
DEFAULT_SYSTEMS: Final = (
    *(ALONE, "default", "stock-512", "targets-300-40", "stock-1024", "targets"),
    *("stock-priority", "stock", "stock-2048"),
)
_PREFILL_GRAPHS: Final = ("breakable", "disabled")
"""Ways to run prefills that have safepoints."""

_FULL_PREFILL_GRAPHS: Final = {
    "prefill": {"backend": "full", "full_prefill_max_req": 64, "max_bs": 2048}
}
"""SGLang's ``--cuda-graph-config``: whole prefills of up to 2,048 tokens as one graph each. It has
room for 64 requests; by default for the chunk size ÷ 512, fewer than decodes that ride along."""

_PLANS: Final = "plans"
_STEP_TIMES: Final = "step_times"
_COMPARED: Final = ("results.json", ("table.md", f"{_STEP_TIMES}/{SUMMARY}.md"))
"""Written by bench_serving, and by ``reduce_folder``."""

_MOST_TOKENS_PER_S: Final = 30_000
"""Offline tokens/s that no system exceeds: an H200 has done 26,504 with this model."""

_AROUND_S: Final = 30
"""Time for which the offline load runs before and after the online one."""

_GPU_TESTS: Final = _BENCHMARKS.parent / "test" / "srt" / "safepoint_cuda"


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """How servers are started; the same for every system that is compared."""

    dry_run: bool
    """On this CPU, with a tiny model and tiny counts, to find faults."""

    model_path: str
    load_format: str = "dummy"
    attention_backend: str | None = None
    """SGLang's flag; None: SGLang chooses by the GPU."""

    sampling_backend: str = "pytorch"
    offline_concurrency: int = 96
    """Offline requests at a time in the co-load steps; with their default lengths of 4,224 tokens
    they need 405,504 tokens of KV."""

    more_flags: tuple[str, ...] = ()
    """Flags that the user adds to every server."""

    def server_settings(self) -> dict[str, Any]:
        """Return the ``ServerArgs`` fields that every engine gets, but for the model."""
        chosen = (
            {} if self.attention_backend is None else {"attention_backend": self.attention_backend}
        )
        if self.dry_run:
            return {**chosen, "max_total_tokens": 16384, "chunked_prefill_size": 512}
        return {
            **chosen,
            "load_format": self.load_format,
            "dtype": "bfloat16",
            "sampling_backend": self.sampling_backend,
            "context_length": 32768,
            "chunked_prefill_size": 8192,
            "mem_fraction_static": 0.85,
            "cuda_graph_max_bs_decode": 256,
        }

    def server_flags(self) -> list[str]:
        """Return ``server_settings`` as flags, then the user's flags."""
        settings = self.server_settings().items()
        flags = [word for name, v in settings for word in (f"--{name.replace('_', '-')}", str(v))]
        return [*flags, *self.more_flags]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure. Its command goes on where an earlier attempt was stopped."""

    name: str
    question: str
    """The question that its figures answer, for the tables."""

    least_s: float
    """With less time than this, it is not worth starting."""

    command: Callable[[GpuSetting, Path], Sequence[str]]
    """Given the setting and the step's folder, which has ``profile`` and others beside it."""

    results: str = ""
    """JSON file in the folder that holds the figures."""

    tables: tuple[str, ...] = ()
    """Markdown files in the folder; without any the end of the log is shown."""

    limit_s: float = 480.0
    """Longest time of one attempt."""

    asked: tuple[str, ...] = ()
    """Systems asked for. A step that is done with others runs again, and measures the rest."""

    reduce: Callable[[Path], Mapping[str, Any]] | None = None
    """Called with the folder after each attempt: makes its files small, returns more figures."""


@dataclass(frozen=True, slots=True)
class CoLoad:
    """Both classes on a server of each system: Poisson arrivals, by default ConServe §6.2's."""

    rate_per_s: float
    systems: tuple[str, ...] = (ALONE, "targets", "default", "stock-priority")
    """Names of ``COLOAD_SYSTEMS``, or texts that bench_serving takes, the most valuable first: a
    step that is stopped early goes on with the rest."""

    window_s: int = 40
    online_lengths: tuple[int, int] = (4096, 256)
    """Prompt and output tokens."""

    offline_lengths: tuple[int, int] = (4096, 128)
    concurrency: int | None = None
    """Offline requests at a time; None: the setting decides."""

    targets: tuple[str, ...] = ("--slo-scale", "1.2")
    """Flags of bench_serving."""

    kv_tokens: int | None = None
    """KV of every server; None: the memory decides."""

    records_plans: bool = True
    """Ours records its plans; ``reduce_folder`` keeps their step times."""

    def command(self, setting: GpuSetting, folder: Path) -> list[str]:
        """Return the command line of ``sglang_coserve.bench_serving``."""
        dry = setting.dry_run
        window_s = 5 if dry else self.window_s
        # What the first attempt had stays: runs with another profile would not compare.
        profile, own = folder.parent / "profile" / "profile.json", folder / "latency_profile.json"
        if profile.is_file() and not (folder / "runs").exists():
            folder.mkdir(parents=True, exist_ok=True)
            own.write_bytes(profile.read_bytes())
        profiled = ["--latency-profile", str(own)] if own.is_file() else []
        plans = folder / _PLANS if self.records_plans else None
        if plans is not None:
            # A killed attempt may have left recordings, and a server would number its own.
            shutil.rmtree(plans, ignore_errors=True)
            plans.mkdir(parents=True)
        systems = [_bench_system(system, profiled, plans) for system in self.systems]
        command = [sys.executable, "-m", "sglang_coserve.bench_serving", "--out", str(folder)]
        command += ["--model-path", setting.model_path, "--make-requests-early"]
        command += self.targets if ALONE in self.systems else ()
        command += ["--warmup-s", "1" if dry else "5", "--ready-timeout-s", "400"]
        command += ["--systems", *systems, "--server", *setting.server_flags()]
        if self.kv_tokens is not None and not dry:
            command += ["--max-total-tokens", str(self.kv_tokens)]
        command += ["--online", "--request-rate", str(self.rate_per_s)]
        command += ["--num-prompts", str(round(self.rate_per_s * window_s))]
        command += _random_ids(*((64, 8) if dry else self.online_lengths))
        concurrency = self.concurrency or setting.offline_concurrency
        command += ["--offline", "--max-concurrency", str(4 if dry else concurrency)]
        command += ["--num-prompts", str(2000 if dry else concurrency + self._num_answered())]
        return [*command, *_random_ids(*((128, 8) if dry else self.offline_lengths))]

    def _num_answered(self) -> int:
        """Return the most offline requests that are answered; making more takes time and memory."""
        tokens = _MOST_TOKENS_PER_S * (self.window_s + _AROUND_S)
        return math.ceil(tokens / sum(self.offline_lengths))


def check_systems(names: Sequence[str]) -> None:
    """Check values of ``--coload-systems``: names of ``COLOAD_SYSTEMS``, or texts with flags.

    Raises:
        ConfigError: a name is unknown, two name the same system, or the targets of a system would
            come from a run that is not asked for.
    """
    seen: dict[str, str] = {}
    for name in names:
        if name not in COLOAD_SYSTEMS and name.partition(" ")[0].partition(":")[0] not in SYSTEMS:
            known = ", ".join(COLOAD_SYSTEMS)
            raise ConfigError(f"--coload-systems {name!r}: known are {known}, and 'coserve FLAGS'")
        label = _words_of(name)[0]
        if label in seen:
            raise ConfigError(f"--coload-systems {name!r}: the same as {seen[label]!r}")
        seen[label] = name
        if _parsed(name).takes_slo and ALONE not in names:
            raise ConfigError(
                f"--coload-systems {name!r}: its targets come from {ALONE!r}, which must be among "
                "the systems"
            )


def _text_of(name: str) -> str:
    """Return a system as bench_serving takes it; a text that is no known name stays as it is."""
    return COLOAD_SYSTEMS[name].server if name in COLOAD_SYSTEMS else name


def _parsed(name: str) -> System:
    return parse_system(_text_of(name))


def _words_of(name: str) -> list[str]:
    """Return ``KIND:LABEL`` and the flags of a system. Its own flags are its label by default."""
    system = _parsed(name)
    first, *flags = shlex.split(_text_of(name))
    if ":" not in first and (flags or system.is_ours):
        first += ":" + (" ".join(flags) or "default")
    return [first, *flags]


def _bench_system(name: str, profiled: Sequence[str], plans: Path | None) -> str:
    """Return a system as bench_serving takes it; ours with flags that this program adds.

    Args:
        name: A name of ``COLOAD_SYSTEMS``, or a text that bench_serving takes.
        profiled: Flags that name the latency profile.
        plans: Folder of the recorded plans; None: no recordings.
    """
    words = _words_of(name)
    if _parsed(name).is_ours:
        words += profiled
        if plans is not None:
            label = words[0].partition(":")[2]
            words += ["--record-plans", str(plans / f"{folder_name(label)}.jsonl")]
    return shlex.join(words)


def _random_ids(prompt_tokens: int, output_tokens: int) -> list[str]:
    flags = ["--dataset-name", "random-ids", "--random-range-ratio", "1", "--tokenize-prompt"]
    flags += ["--random-input-len", str(prompt_tokens)]
    return [*flags, "--random-output-len", str(output_tokens)]


def _safepoint(setting: GpuSetting, folder: Path) -> list[str]:
    """Each way to run prefills that has safepoints, with and without them.

    An arrival that would have its first token after 50 ms suspends.
    """
    graphs = (
        [""] if setting.dry_run else [f" --cuda-graph-backend-prefill {g}" for g in _PREFILL_GRAPHS]
    )
    systems = [f"coserve-slo --safepoint-interval {n}{flags}" for flags in graphs for n in (4, 0)]
    load = CoLoad(
        4.0,
        systems=(ALONE, *systems),
        window_s=15,
        online_lengths=(512, 4),
        offline_lengths=(8192, 1),
        concurrency=8,
        targets=("--slo-ttft-ms", "50", "--slo-tpot-ms", "50"),
        records_plans=False,
    )
    return load.command(setting, folder)


def _profile(setting: GpuSetting, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "sglang_coserve", "profile"]
    command += ["--model-path", setting.model_path, "--output", str(folder / "profile.json")]
    command += ["--quiet", "--time-limit", "12" if setting.dry_run else "75"]
    command += ["--max-shapes", "30" if setting.dry_run else "400"]
    return [*command, "--log-level", "error", *setting.server_flags()]


def _launch_floor(setting: GpuSetting, folder: Path, *more: str) -> list[str]:
    dry = setting.dry_run
    command = [sys.executable, "-m", "gpu.launch_floor"]
    command += ["--model-path", setting.model_path, "--out", str(folder / "launch_floor.json")]
    command += ["--rounds", "2" if dry else "12", "--limit-s", "5" if dry else "25"]
    return [*command, "--server", *setting.server_flags(), *more]


def _full_launch_floor(setting: GpuSetting, folder: Path) -> list[str]:
    """The launch floor with whole prefills as CUDA graphs; a CPU has no graphs."""
    graphs = ["--cuda-graph-config", json.dumps(_FULL_PREFILL_GRAPHS)]
    return _launch_floor(setting, folder, *([] if setting.dry_run else graphs))


def _overlap(setting: GpuSetting, folder: Path) -> list[str]:
    dry = setting.dry_run
    # On a CPU the schedulers' own defaults serve. No larger decode graphs than the batches.
    settings = {} if dry else setting.server_settings() | {"cuda_graph_max_bs_decode": 32}
    command = [sys.executable, str(_BENCHMARKS / "bench_overhead.py")]
    command += ["--model-path", setting.model_path, "--settings", json.dumps(settings)]
    command += ["--rounds", "1" if dry else "3", "--passes", "10" if dry else "100"]
    command += ["--limit-s", "5" if dry else "10", "--out", str(folder / "overhead.json")]
    systems = [f"{who} overlap {how}" for who in ("coserve", "stock") for how in ("on", "off")]
    command += ["--systems", *systems]
    return [*command, "--waiting", *(["100"] if dry else ["100", "10000"])]


def _tests(_setting: GpuSetting, _folder: Path) -> list[str]:
    root = _BENCHMARKS.parent
    command = [sys.executable, "-m", "pytest", "--rootdir", str(root), "-c"]
    command += [str(root / "pyproject.toml"), "-p", "no:cacheprovider", "-v", "-m", "gpu"]
    return [*command, str(_GPU_TESTS)]


def _reduce(folder: Path) -> Mapping[str, Any]:
    return {_STEP_TIMES: reduce_folder(folder / _PLANS, folder / _STEP_TIMES)}


def _coload(
    name: str,
    question: str,
    load: CoLoad,
    least_s: float = 200,
    asked: tuple[str, ...] = (),
) -> Step:
    return Step(
        *(name, question, least_s, load.command, *_COMPARED),
        limit_s=540,
        asked=asked,
        reduce=_reduce,
    )


def _floor(name: str, question: str, command: Callable[[GpuSetting, Path], Sequence[str]]) -> Step:
    return Step(name, question, 60, command, "launch_floor.json", ("launch_floor.md",), 150)


def make_steps(coload_systems: Sequence[str] = DEFAULT_SYSTEMS) -> tuple[Step, ...]:
    """Return all steps, the most valuable first; the step ``coload`` has ``coload_systems``."""
    systems = tuple(coload_systems)
    coload = _coload(
        "coload",
        "Both classes on one engine, Poisson arrivals at 2 req/s",
        CoLoad(2.0, systems=systems),
        asked=systems,
    )
    return (*_BEFORE_COLOAD, coload, *_AFTER_COLOAD)


_BEFORE_COLOAD: Final = (
    _floor("launch-floor", "Least time of a pass, by prompt tokens and decodes", _launch_floor),
    _coload(
        "smoke",
        "Does the stack serve both classes?",
        CoLoad(1.0, systems=(ALONE, "targets"), window_s=8, records_plans=False),
        least_s=120,
    ),
    Step("profile", "How well are step times predicted?", 120, _profile, "profile.json"),
)
_AFTER_COLOAD: Final = (
    _floor("launch-floor-full", "The same with whole prefills as CUDA graphs", _full_launch_floor),
    Step(
        "safepoint",
        "What safepoints cost, and how soon they free the GPU",
        200,
        _safepoint,
        *_COMPARED,
    ),
    Step(
        "overlap",
        "Scheduling overhead of a step, overlap on and off",
        120,
        _overlap,
        "overhead.json",
    ),
    _coload(
        "coload-kv",
        "The same beside KV that is short, with checkpoints and without",
        CoLoad(
            2.0,
            systems=(
                ALONE,
                "coserve-slo --kv-checkpoint off",
                "coserve-slo --kv-checkpoint eager",
                "stock-1024",
            ),
            kv_tokens=131_072,
        ),
    ),
    Step("tests", "Tests that need a GPU", 60, _tests),
    *(
        _coload(f"coload-{rate_per_s}", f"The same at {rate_per_s} req/s", CoLoad(rate_per_s))
        for rate_per_s in (1, 3, 4)
    ),
)
