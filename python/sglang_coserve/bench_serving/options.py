"""The command line: our own flags, then those of the servers and of both loads."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from sglang_coserve.bench_serving import stock
from sglang_coserve.config.flags import FlagParser, add_flags, setting
from sglang_coserve.demo.servers import PRIORITIES, System
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.start_defaults import as_flags

SECTIONS: Final = ("--server", "--online", "--offline")
"""Words after which another program's flags come."""

_OURS: Final = ("--base-url", "--host", "--port", "--output-file")
"""Flags of bench_serving that this program sets."""

_MARKED: Final[Mapping[str, Any]] = {"offline_body": {"service_tier": "flex"}}
ALONE: Final = "alone"
"""Latencies are divided by this system's."""

SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        System(ALONE, is_ours=False, has_offline=False),
        System("stock", is_ours=False),
        System(
            "stock-priority", is_ours=False, flags=("--enable-priority-scheduling",), **PRIORITIES
        ),
        System("stock-tuned", is_ours=False, is_searched=True, **PRIORITIES),
        System("coserve", is_ours=True, **_MARKED),
        System("coserve-slo", is_ours=True, takes_slo=True, **_MARKED),
    )
}
"""By name; a new contender is a new entry."""

_NO_TARGETS: Final = SloTargets()
_DEFAULT_SYSTEMS: Final = (ALONE, "stock-tuned", "coserve")

_EPILOG: Final = """\
After these flags, in any order:
  --server FLAGS   flags of sglang.launch_server, for every server alike
  --online FLAGS   flags of sglang.bench_serving: the online load
  --offline FLAGS  flags of sglang.bench_serving: the offline load, which is marked

Example:
  python -m sglang_coserve.bench_serving --model-path MODEL \\
    --online --dataset-name random --num-prompts 200 --request-rate 4 \\
    --offline --dataset-name random --num-prompts 1000
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run."""

    systems: tuple[System, ...]
    online: tuple[str, ...]
    offline: tuple[str, ...]
    server: tuple[str, ...] = ()
    urls: Mapping[str, str] = field(default_factory=dict)
    """Of servers that run already, by system; empty to start servers."""

    targets: SloTargets = _NO_TARGETS
    model_path: str | None = setting(None, "start a server of this model for each system")
    out: Path = setting(Path("bench-serving"), "where everything goes", type=Path)
    slo_scale: float | None = setting(
        None, "targets are P99 TTFT and P99 ITL of alone, times this", type=float
    )
    chunk_tokens: tuple[int, ...] = setting(
        stock.CHUNK_TOKENS,
        "chunk sizes that stock-tuned tries (default: 128 to 2048)",
        nargs="+",
        type=int,
        metavar="N",
    )
    repeats: int = setting(1, "measure each so often: medians and ranges", type=int)
    warmup_s: float = setting(5.0, "offline load alone before the online one", type=float)
    steady_state_concurrency_ratio: float = setting(
        0.8,
        "SGLang's: its steady state has this share of the peak concurrency (default: 0.8)",
        type=float,
    )
    make_requests_early: bool = setting(
        False,
        "make the first repeat's requests while its server starts: saves seconds, where cores are "
        "idle then",
        action="store_true",
    )
    ready_timeout_s: float = setting(600.0, "longest start of a server", type=float)
    run_timeout_s: float = setting(3600.0, "longest run of a load", type=float)

    def __post_init__(self) -> None:
        for name, value in (
            ("--ready-timeout-s", self.ready_timeout_s),
            ("--run-timeout-s", self.run_timeout_s),
            ("--slo-scale", 1.0 if self.slo_scale is None else self.slo_scale),
            ("--repeats", self.repeats),
            *(("--chunk-tokens", tokens) for tokens in self.chunk_tokens),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} {value:g}: it must be a positive number")
        if not 0 <= self.warmup_s < math.inf:
            raise ConfigError(f"--warmup-s {self.warmup_s:g}: it must be at least 0")
        if not 0 < (ratio := self.steady_state_concurrency_ratio) <= 1:
            raise ConfigError(
                f"--steady-state-concurrency-ratio {ratio:g}: it must be above 0 and at most 1"
            )
        if not self.online:
            raise ConfigError("no online load: add --online and flags of sglang.bench_serving")
        has_offline = any(system.has_offline for system in self.systems)
        if has_offline and not self.offline:
            raise ConfigError("no offline load: add --offline and flags of sglang.bench_serving")
        for section, flags in (("--online", self.online), ("--offline", self.offline)):
            for flag in flags:
                name = flag.partition("=")[0]
                # SGLang's parser takes the beginning of a flag for the flag.
                if len(name) > 2 and any(own.startswith(name) for own in _OURS):
                    raise ConfigError(f"{section} … {flag}: this program sets that itself")
        if bool(self.urls) == bool(self.model_path):
            raise ConfigError("give either --model-path, to start servers, or --base-url")
        has_targets = self.targets != _NO_TARGETS
        if self.slo_scale is not None and (has_targets or self.systems[0].name != ALONE):
            raise ConfigError(
                f"--slo-scale takes the targets from {ALONE!r}: have it among the --systems, and "
                "no --slo-ttft-ms nor --slo-tpot-ms"
            )
        if any(s.takes_slo for s in self.systems) and not has_targets and self.slo_scale is None:
            raise ConfigError(
                "a system that takes targets needs --slo-ttft-ms, --slo-tpot-ms or --slo-scale"
            )


_FLAGS: Final = [each for each in fields(Options) if each.metadata]


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        ConfigError: a value cannot be used.
        SystemExit: argparse refused the command line, or printed its help.
    """
    sections: dict[str, list[str]] = {"": [], **{name: [] for name in SECTIONS}}
    section = ""
    for word in argv:
        if word in SECTIONS:
            section = word
        else:
            sections[section].append(word)
    args = make_parser().parse_args(sections[""])
    systems, urls = _systems(args)
    given: dict[str, Any] = {each.name: getattr(args, each.name) for each in _FLAGS}
    given["chunk_tokens"] = tuple(dict.fromkeys(given["chunk_tokens"]))
    return Options(
        systems=systems,
        urls=urls,
        server=tuple(sections["--server"]),
        online=tuple(sections["--online"]),
        offline=tuple(sections["--offline"]),
        targets=SloTargets.of_ms(args.slo_ttft_ms, args.slo_tpot_ms),
        **given,
    )


def parse_system(text: str) -> System:
    """Return the system of ``NAME[:LABEL] [FLAGS…]``: a known one, with more server flags.

    Results name a system ``NAME:LABEL``, and a system without a label by the whole text.

    Raises:
        ConfigError: the name is unknown, the label is empty, or a quotation does not end.
    """
    try:
        first, *flags = shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigError(f"--systems {text!r}: {error}") from error
    name, colon, label = first.partition(":")
    if name not in SYSTEMS:
        raise ConfigError(f"--systems {name!r}: known are {', '.join(SYSTEMS)}")
    if colon and not label:
        raise ConfigError(f"--systems {first!r}: give a label after the colon, or no colon")
    shown = first if label else text
    return replace(SYSTEMS[name], name=shown, flags=(*SYSTEMS[name].flags, *flags))


def tuned_stock(searched: System, settings: Mapping[str, Any]) -> System:
    """Return the system with ``settings``, fields of ``ServerArgs``, in place of a search."""
    words = as_flags(settings)
    flags: Sequence[str] = (*words, *searched.flags)
    return replace(
        searched, name=" ".join((searched.name, *words)), flags=tuple(flags), is_searched=False
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of our own flags."""
    parser = FlagParser(
        prog="python -m sglang_coserve.bench_serving",
        description="Runs SGLang's bench_serving twice at once, online and offline, on one server "
        "or on several systems in turn.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--systems",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(SYSTEMS)}; 'NAME FLAGS' adds flags of its server, and "
        "'NAME:LABEL FLAGS' has a short name in the results "
        f"(default: {' '.join(_DEFAULT_SYSTEMS)})",
    )
    add(
        "--base-url",
        nargs="+",
        metavar="[NAME=]URL",
        default=[],
        help="servers that run already, with the system that each is (default: coserve)",
    )
    add("--slo-ttft-ms", type=float, help="target: for goodput, and for systems that take it")
    add("--slo-tpot-ms", type=float, help="likewise")
    add_flags(parser, _FLAGS)
    return parser


def _systems(args: argparse.Namespace) -> tuple[tuple[System, ...], Mapping[str, str]]:
    if not args.base_url:
        words = args.systems or list(_DEFAULT_SYSTEMS)
        texts = [t for word in words for t in (word.split(",") if " " not in word else [word])]
        # Others' latencies are divided by its, and targets may come from it.
        systems = sorted(map(parse_system, dict.fromkeys(texts)), key=lambda s: s.name != ALONE)
        names = [system.name for system in systems]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"--systems {twice.pop()!r}: two systems have this label")
        return tuple(systems), {}
    if args.systems:
        raise ConfigError("--systems starts servers: with --base-url give NAME=URL instead")
    given, urls = [], {}
    for word in args.base_url:
        name, _, url = word.partition("=") if not word.startswith("http") else ("coserve", "", word)
        system = parse_system(name)
        if not url.startswith("http") or system.is_searched:
            raise ConfigError(
                f"--base-url {word}: give [NAME=]http://…, NAME a system, not searched"
            )
        given.append(system)
        urls[system.name] = url.rstrip("/")
    if len(urls) < len(given):
        raise ConfigError("--base-url: each system can be given once")
    return tuple(sorted(given, key=lambda system: system.name != ALONE)), urls
