"""Everything that is to be measured on one GPU, the most valuable first.

    python benchmark/bench_gpu.py --minutes 25 --out results

Runs as many steps as the time allows, each other programs in processes of their own. The same
command goes on where it was stopped: by the time, by Ctrl-C, by a machine that went away. A step
that fails keeps none of the others from running; the end of its log is in its JSON file.
docs/gpu_results.md says what the steps measure.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.results import claim_folder, recorded_command, settings_of
from gpu.driver import Driver, StepStatus
from gpu.llama_shape import write_llama_shape
from gpu.steps import (
    COLOAD_SYSTEMS,
    DEFAULT_SYSTEMS,
    DRY_RUN_NOTE,
    GpuSetting,
    check_systems,
    make_steps,
)
from sglang_coserve.errors import ConfigError
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import terminate_as_interrupt

_EPILOG = """\
--coload-systems takes these names, and 'NAME[:LABEL] FLAGS' as --systems of bench_serving does:"""
_DESCRIBE = "import json; from common.machine import *; print(json.dumps(describe_machine()))"


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    args = parse(argv)
    if args.list:
        for step in make_steps():
            print(f"{step.name:18} {step.question}")
        return 0
    out: Path = args.out.resolve()
    try:
        check_systems(args.coload_systems)
        if args.offline_concurrency < 1:
            raise ConfigError(
                f"--offline-concurrency {args.offline_concurrency}: it must be at least 1"
            )
        setting = GpuSetting(
            dry_run=args.dry_run_cpu,
            model_path=args.model_path or str(out / "work" / "model"),
            load_format=args.load_format,
            attention_backend=args.attention_backend,
            sampling_backend=args.sampling_backend,
            offline_concurrency=args.offline_concurrency,
            more_flags=tuple(shlex.split(args.server_flags)),
        )
        claim_folder(out / "setting.json", settings_of(setting))
        if args.model_path is None:
            make_model(Path(setting.model_path), args.dry_run_cpu)
    except (ValueError, ConfigError) as error:
        say(str(error))
        return 2
    every = make_steps(args.coload_systems)
    by_name = {step.name: step for step in every}
    driver = Driver(
        [by_name[name] for name in dict.fromkeys(args.steps)],
        out,
        setting,
        command=recorded_command(["python", "benchmark/bench_gpu.py", *argv]),
        machine=describe_machine(),
        say=say,
        shown=every,
    )
    return run(driver, args.minutes * 60)


def run(driver: Driver, seconds: float) -> int:
    """Run the steps; return 1 where a step failed, else 0."""
    if driver.setting.dry_run:
        say(DRY_RUN_NOTE)
    try:
        with terminate_as_interrupt():
            driver.run(seconds)
    except KeyboardInterrupt:
        say("interrupted; its processes have ended, the same command goes on")
        return 130
    names = [step.name for step in driver.steps]
    if missing := [name for name in names if name not in driver.records]:
        say(f"no time for: {', '.join(missing)}")
    say(f"written: {driver.out / 'gpu.md'}")
    records = [driver.records[name] for name in names if name in driver.records]
    return int(any(record.status is StepStatus.FAILED for record in records))


def make_model(folder: Path, dry_run: bool) -> None:
    """Make a model without weights if need be."""
    if dry_run:
        make_small_model(folder, SmallModelSpec())
    else:
        write_llama_shape(folder)


def describe_machine() -> dict[str, Any]:
    """Ask a process that ends: what asks the GPU for its name keeps memory there."""
    command = [sys.executable, "-c", _DESCRIBE]
    told = subprocess.check_output(command, cwd=Path(__file__).parent, text=True)
    described: dict[str, Any] = json.loads(told.splitlines()[-1])
    return described


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    meanings = (f"  {name:16} {system.meaning}" for name, system in COLOAD_SYSTEMS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join((_EPILOG, *meanings)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=25.0, help="start nothing that cannot end in this time")
    add("--out", type=Path, default=Path("bench-gpu"), help="where everything goes")
    names = [step.name for step in make_steps()]
    add(
        "--steps",
        nargs="+",
        default=names,
        choices=names,
        help="in order; default: all, as --list has them",
    )
    add("--list", action="store_true", help="name the steps and end")
    add(
        "--dry-run-cpu",
        action="store_true",
        help="run every step on this CPU with a tiny model and tiny counts, to find faults",
    )
    add("--model-path", help="default: the shape of Llama-3.1-8B with dummy weights")
    add("--load-format", default="dummy", help="SGLang's flag")
    add("--attention-backend", help="SGLang's flag; default: what SGLang chooses, fa3 on Hopper")
    add(
        "--sampling-backend",
        default="pytorch",
        help="SGLang's flag (default: pytorch, which needs no kernels compiled by FlashInfer)",
    )
    add(
        "--coload-systems",
        nargs="+",
        default=list(DEFAULT_SYSTEMS),
        metavar="NAME",
        help=f"systems of the step coload, in order (default: {' '.join(DEFAULT_SYSTEMS)})",
    )
    add(
        "--offline-concurrency",
        type=int,
        default=96,
        metavar="N",
        help="offline requests at a time in coload steps (default: %(default)s; 64 fit beside "
        "online ones into an H100's memory)",
    )
    add("--server-flags", default="", metavar="'FLAGS'", help="for every server alike")
    return parser.parse_args(argv)


def say(text: str) -> None:
    """Tell whoever watches."""
    print(f"bench_gpu: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
