"""The command line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common import stock
from common.results import settings_of, taken_from
from coserve_bench.offline_lines import OfflineSpec
from coserve_bench.online_requests import OnlineSpec
from coserve_bench.slo import SloRule
from coserve_bench.systems import BASELINE, SEARCHED, SYSTEMS, THROUGHPUT_BOUND, System
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets

__all__ = ["Options", "parse_options"]

_DEFAULT_SYSTEMS = (BASELINE, "stock-fcfs", "stock-priority", THROUGHPUT_BOUND, "coserve")


_FLAGS: Final = {
    **{f"{name}_s": name for name in ("window", "warmup", "online_warmup", "drain")},
    "loads": "online_load",
    "capacity_per_s": "capacity",
    "ready_timeout_s": "ready_timeout",
    "ooco_first_rate_per_s": "ooco_first_rate",
}
"""Fields of ``Options`` whose flags have another name."""

_ONLINE: Final = {
    "trace": "online_trace",
    "prompt_tokens": "online_input_len",
    "output_tokens": "online_output_len",
    "range_ratio": "online_range_ratio",
}
_OFFLINE: Final = {
    "file": "offline_file",
    "prompt_tokens": "offline_input_len",
    "output_tokens": "offline_output_len",
    "lines": "offline_lines",
    "concurrency": "offline_concurrency",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. ``parse_options`` documents every field as a flag."""

    out: Path
    systems: tuple[System, ...]
    loads: tuple[float, ...]
    repeats: int
    window_s: float
    warmup_s: float
    online_warmup_s: float
    drain_s: float
    seed: int
    capacity_per_s: float | None
    capacity_requests: int
    model_path: str | None
    server_flags: tuple[str, ...]
    latency_profile: Path | None
    ready_timeout_s: float
    online: OnlineSpec
    offline: OfflineSpec
    rules: tuple[SloRule, ...]
    ooco: bool
    ooco_runs: int
    ooco_first_rate_per_s: float | None
    speed_tolerance: float
    speed_repeats: int

    def __post_init__(self) -> None:
        for name, value in (
            ("--repeats", self.repeats),
            ("--window", self.window_s),
            ("--offline-concurrency", self.offline.concurrency),
            *((f"--online-load {load}", load) for load in self.loads),
            *((f"SLO scale {rule.scale}", rule.scale) for rule in self.rules),
        ):
            if not value > 0:
                raise ConfigError(f"{name} must be greater than 0")
        if not self.online_warmup_s >= 0:
            raise ConfigError("--online-warmup must be at least 0")
        if not self.speed_tolerance > 0:
            raise ConfigError(
                "--speed-tolerance must be greater than 0; inf measures each run once"
            )
        if self.speed_repeats < 0:
            raise ConfigError("--speed-repeats must be at least 0")
        if self.window_s < 1:
            raise ConfigError("--window must be at least 1 s")
        for path in (self.latency_profile, self.online.trace, self.offline.file):
            if path is not None and not path.is_file():
                raise ConfigError(f"{path}: there is no such file")
        if self.ooco and len(self.loads) != 1:
            raise ConfigError("--ooco searches at one load: give one --online-load")

    def of_measurement(self) -> dict[str, Any]:
        """Return, as JSON values, what must be equal for runs to belong together.

        Loads, repeats, systems and SLOs are not among it: more of them can be
        added to the runs of an earlier command.
        """
        names = (
            "window_s",
            "warmup_s",
            "online_warmup_s",
            "seed",
            "model_path",
            "server_flags",
            "latency_profile",
        )
        settings = settings_of(self)
        return {name: settings[name] for name in (*names, "online", "offline")}


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        ConfigError: a value is out of range.
        SystemExit: argparse refused the command line, or printed its help.
    """
    flags = _parser().parse_args(argv)
    if flags.quick:
        flags.online_load = flags.online_load or [0.5]
        flags.repeats, flags.window, flags.warmup, flags.online_warmup = 1, 8.0, 2.0, 0.0
        flags.capacity_requests, flags.speed_repeats = 40, 0
    flags.systems = _systems(flags.systems)
    flags.online_load = tuple(dict.fromkeys(flags.online_load or (0.2, 0.5, 0.8)))
    flags.server_flags = tuple(shlex.split(flags.server_flags))
    flags.rules = _rules(flags)
    flags.online = taken_from(flags, OnlineSpec, _ONLINE)
    flags.offline = taken_from(flags, OfflineSpec, _OFFLINE)
    return taken_from(flags, Options, _FLAGS)


def _systems(given: Sequence[str]) -> tuple[System, ...]:
    names = [name for word in given for name in SEARCHED.get(word, [word])]
    unknown = sorted(set(names) - SYSTEMS.keys())
    if unknown:
        known = ", ".join([*SEARCHED, *SYSTEMS])
        raise ConfigError(f"--systems {', '.join(unknown)}: known are {known}")
    for name in names:
        if name in SEARCHED["stock-interleaved"]:
            stock.require_decode_interval(name)
    # Without the baseline there is neither a target nor a ratio.
    return tuple(SYSTEMS[name] for name in dict.fromkeys((BASELINE, *names)))


def _rules(flags: argparse.Namespace) -> tuple[SloRule, ...]:
    if flags.slo_ttft_ms is not None or flags.slo_tpot_ms is not None:
        by_hand = SloTargets(_seconds(flags.slo_ttft_ms), _seconds(flags.slo_tpot_ms))
        p99 = [SloRule("fixed", targets=by_hand)]
    else:
        scales = flags.slo_scale or ([1.5] if flags.ooco else [1.0])
        p99 = [SloRule("p99", scale) for scale in scales]
    return (*p99, *(SloRule("mean-tpot", scale) for scale in flags.slo_mean_tpot))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compares ways to serve an online and an offline load with one engine."
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-coserve"), help="where everything goes")
    add(
        "--systems",
        nargs="+",
        default=_DEFAULT_SYSTEMS,
        metavar="NAME",
        help=f"of {', '.join([*SEARCHED, *SYSTEMS])} (default: {' '.join(_DEFAULT_SYSTEMS)})",
    )
    add(
        "--online-load",
        nargs="+",
        type=float,
        metavar="FRACTION",
        help="online request rates over the capacity (default: 0.2 0.5 0.8)",
    )
    add("--repeats", type=int, default=3)
    add("--window", type=float, default=25.0, metavar="S", help="how long online requests arrive")
    add("--warmup", type=float, default=4.0, metavar="S", help="offline load alone before that")
    add(
        "--online-warmup",
        type=float,
        default=10.0,
        metavar="S",
        help="both loads, not counted, before the window",
    )
    add("--drain", type=float, default=90.0, metavar="S", help="longest wait for online answers")
    add("--seed", type=int, default=1)
    add("--quick", action="store_true", help="a smoke run: one repeat, one load, short windows")
    add("--capacity", type=float, metavar="RPS", help="online requests/s; default: measured")
    add("--capacity-requests", type=int, default=100, help="sent at once to measure it")

    group = parser.add_argument_group("the machine's speed")
    add = group.add_argument
    add(
        "--speed-tolerance",
        type=float,
        default=0.08,
        metavar="SHARE",
        help="a run on a machine further off its usual speed is made again (default: 0.08)",
    )
    add("--speed-repeats", type=int, default=2, help="how often, at most; the best one counts")

    group = parser.add_argument_group("servers")
    add = group.add_argument
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flags", default="", metavar="'FLAGS'", help="for every server alike")
    add("--latency-profile", type=Path, help="from coserve profile; default: servers profile")
    add("--ready-timeout", type=float, default=300.0, metavar="S")

    group = parser.add_argument_group("online load")
    add = group.add_argument
    add("--online-trace", type=Path, help="Azure, BurstGPT or Mooncake; default: Gamma arrivals")
    add("--cv", type=float, default=1.0, help="of the Gamma gaps; 1 is Poisson")
    add("--online-input-len", type=int, default=256, help="longest prompt")
    add("--online-output-len", type=int, default=64, help="longest output")
    add("--online-range-ratio", type=float, default=0.5, help="shortest over longest")

    group = parser.add_argument_group("offline load")
    add = group.add_argument
    add("--offline-file", type=Path, help="JSONL in OpenAI's batch format; default: random lines")
    add("--offline-input-len", type=int, default=512)
    add("--offline-output-len", type=int, default=32)
    add("--offline-lines", type=int, default=2000, help="of the random file")
    add("--offline-concurrency", type=int, default=32, help="requests the server always has")

    group = parser.add_argument_group("targets of the systems that take some")
    add = group.add_argument
    add("--slo-scale", nargs="+", type=float, help="times online-only's P99 (default: 1.0)")
    add("--slo-mean-tpot", nargs="+", type=float, default=[], help="times its mean TPOT, as HyGen")
    add("--slo-ttft-ms", type=float, help="by hand, in place of --slo-scale")
    add("--slo-tpot-ms", type=float, help="by hand, in place of --slo-scale")

    group = parser.add_argument_group("OOCO's figure")
    add = group.add_argument
    add("--ooco", action="store_true", help="search the largest offline rate, at one load")
    add("--ooco-runs", type=int, default=7, help="at most, for each system")
    add("--ooco-first-rate", type=float, metavar="RPS", help="default: half the capacity")
    return parser
