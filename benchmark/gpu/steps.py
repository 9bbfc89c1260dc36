"""What there is to measure on a GPU, the most valuable first: command lines of other programs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DRY_RUN_NOTE: Final = (
    "Dry run on a CPU with a tiny model: no figure here says anything about a GPU."
)
_BENCHMARKS: Final = Path(__file__).resolve().parents[1]
_MIXED: Final = "stock-priority --enable-mixed-chunk --chunked-prefill-size"
_ALL_SYSTEMS: Final = (
    *("alone", "coserve", f"{_MIXED} 1024", "coserve-slo", "stock-priority", "stock"),
    *(f"{_MIXED} 512", f"{_MIXED} 2048"),
)
_PREFILL_GRAPHS: Final = tuple(
    f" --cuda-graph-backend-prefill {kind}" for kind in ("breakable", "disabled")
)
_COMPARED: Final = ("results.json", "table.md")
"""Written by bench_serving."""

_GPU_TESTS: Final = _BENCHMARKS.parent / "test" / "srt" / "safepoint_cuda"


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """How servers are started; the same for every system that is compared."""

    dry_run: bool
    """On this CPU, with a tiny model and tiny counts, to find faults."""

    model_path: str
    load_format: str = "dummy"
    attention_backend: str = "flashinfer"
    sampling_backend: str = "pytorch"
    more_flags: tuple[str, ...] = ()
    """Of the user, for every server."""

    def server_settings(self) -> dict[str, Any]:
        """Return the ``ServerArgs`` fields that every engine gets, but for the model."""
        if self.dry_run:
            return {"max_total_tokens": 16384, "chunked_prefill_size": 512}
        return {
            "load_format": self.load_format,
            "dtype": "bfloat16",
            "attention_backend": self.attention_backend,
            "sampling_backend": self.sampling_backend,
            "context_length": 32768,
            "chunked_prefill_size": 8192,
            "mem_fraction_static": 0.85,
            "cuda_graph_max_bs_decode": 256,
        }

    def server_flags(self) -> list[str]:
        """Return the same as flags, those of the user behind them."""
        settings = self.server_settings().items()
        flags = [word for name, v in settings for word in (f"--{name.replace('_', '-')}", str(v))]
        return [*flags, *self.more_flags]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure. Its command goes on where an earlier attempt was stopped."""

    name: str
    question: str
    """What its figures answer, for the tables."""

    least_s: float
    """With less time than this, it is not worth starting."""

    command: Callable[[GpuSetting, Path], Sequence[str]]
    """Given the setting and the step's folder, which has ``profile`` and others beside it."""

    results: str = ""
    """JSON file in the folder that holds the figures."""

    tables: str = ""
    """Markdown file in the folder; without one the end of the log is shown."""

    limit_s: float = 480.0
    """Longest time of one attempt."""


@dataclass(frozen=True, slots=True)
class CoLoad:
    """Both classes on a server of each system: Poisson arrivals, by default ConServe §6.2's."""

    rate_per_s: float
    systems: tuple[str, ...] = ("alone", "coserve-slo", "coserve", "stock-priority")
    """In this order: what is stopped early has what matters most, and goes on with the rest."""

    window_s: int = 40
    online_lengths: tuple[int, int] = (4096, 256)
    """Prompt and output tokens."""

    offline_lengths: tuple[int, int] = (4096, 128)
    concurrency: int = 96
    """Offline requests at a time."""

    targets: tuple[str, ...] = ("--slo-scale", "1.2")
    """Flags of bench_serving."""

    kv_tokens: int | None = None
    """Of every server, where its memory is not to be used up."""

    def command(self, setting: GpuSetting, folder: Path) -> list[str]:
        """Return the command line of ``sglang_coserve.bench_serving``."""
        dry = setting.dry_run
        window_s = 5 if dry else self.window_s
        # What the first attempt had stays: runs with another profile would not compare.
        profile, own = folder.parent / "profile" / "profile.json", folder / "latency_profile.json"
        if profile.is_file() and not (folder / "runs").exists():
            folder.mkdir(parents=True, exist_ok=True)
            own.write_bytes(profile.read_bytes())
        planned = shlex.join(["--latency-profile", str(own)]) if own.is_file() else ""
        systems = [
            f"{system} {planned}".strip() if system.startswith("coserve") else system
            for system in self.systems
        ]
        command = [sys.executable, "-m", "sglang_coserve.bench_serving", "--out", str(folder)]
        command += ["--model-path", setting.model_path, *self.targets]
        command += ["--warmup-s", "1" if dry else "5", "--ready-timeout-s", "400"]
        command += ["--systems", *systems, "--server", *setting.server_flags()]
        if self.kv_tokens is not None and not dry:
            command += ["--max-total-tokens", str(self.kv_tokens)]
        command += ["--online", "--request-rate", str(self.rate_per_s)]
        command += ["--num-prompts", str(round(self.rate_per_s * window_s))]
        command += _random_ids(*((64, 8) if dry else self.online_lengths))
        command += ["--offline", "--max-concurrency", str(4 if dry else self.concurrency)]
        # Far more than run in the time; the more there are, the longer their prompts take to make.
        command += ["--num-prompts", "2000" if dry else "800"]
        return [*command, *_random_ids(*((128, 8) if dry else self.offline_lengths))]


def _random_ids(prompt_tokens: int, output_tokens: int) -> list[str]:
    flags = ["--dataset-name", "random-ids", "--random-range-ratio", "1", "--tokenize-prompt"]
    flags += ["--random-input-len", str(prompt_tokens)]
    return [*flags, "--random-output-len", str(output_tokens)]


def _safepoint(setting: GpuSetting, folder: Path) -> list[str]:
    """Each way to run prefills that has safepoints, with and without them.

    An arrival that would have its first token after 50 ms suspends.
    """
    prefills = [""] if setting.dry_run else _PREFILL_GRAPHS
    systems = [f"coserve-slo --safepoint-interval {n}{how}" for how in prefills for n in (4, 0)]
    load = CoLoad(
        4.0,
        systems=("alone", *systems),
        window_s=15,
        online_lengths=(512, 4),
        offline_lengths=(8192, 1),
        concurrency=8,
        targets=("--slo-ttft-ms", "50", "--slo-tpot-ms", "50"),
    )
    return load.command(setting, folder)


def _profile(setting: GpuSetting, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "sglang_coserve", "profile"]
    command += ["--model-path", setting.model_path, "--output", str(folder / "profile.json")]
    command += ["--quiet", "--time-limit", "12" if setting.dry_run else "75"]
    command += ["--max-shapes", "30" if setting.dry_run else "400"]
    return [*command, "--log-level", "error", *setting.server_flags()]


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


def _coload(name: str, question: str, load: CoLoad, least_s: float = 200) -> Step:
    return Step(name, question, least_s, load.command, *_COMPARED)


STEPS: Final = (
    _coload(
        "smoke",
        "Does the stack serve both classes?",
        CoLoad(1.0, systems=("alone", "coserve-slo"), window_s=8),
        least_s=120,
    ),
    Step("profile", "How well are step times predicted?", 120, _profile, "profile.json"),
    _coload(
        "coload",
        "Both classes on one engine, Poisson arrivals at 2 req/s",
        CoLoad(2.0, systems=_ALL_SYSTEMS),
    ),
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
                "alone",
                "coserve-slo --kv-checkpoint off",
                "coserve-slo --kv-checkpoint eager",
                f"{_MIXED} 1024",
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
