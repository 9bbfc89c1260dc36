"""Everything that is to be measured on one GPU, the most valuable first.

    python benchmark/bench_gpu.py --minutes 25 --out results

Runs as many steps as the time allows, each in a process of its own. The same command goes
on where it was stopped: by the time, by Ctrl-C, by a machine that went away. A step that
fails keeps none of the others from running; the end of its log is in its JSON file.
docs/gpu_results.md says what the steps measure.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu import overview
from gpu.driver import Driver
from gpu.record import Status, StepRecord, write_text
from gpu.setting import DRY_RUN_NOTE, Setting
from gpu.steps import STEPS, Step, select
from sglang_coserve.interrupts import terminate_as_interrupt


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    args = parse(argv)
    if args.list:
        for step in STEPS:
            print(f"{step.name:16} {step.question}")
        return 0
    try:
        steps = select(args.steps)
        setting = Setting(
            dry_run=args.dry_run_cpu,
            model_path=args.model_path,
            load_format=args.load_format,
            attention_backend=args.attention_backend,
            sampling_backend=args.sampling_backend,
            server_flags=tuple(shlex.split(args.server_flags)),
        )
        args.out.mkdir(parents=True, exist_ok=True)
        setting.claim(args.out / "setting.json")
    except ValueError as error:
        say(str(error))
        return 2
    return run(steps, setting, args.out.resolve(), args.minutes * 60, argv)


def run(
    steps: Sequence[Step], setting: Setting, out: Path, seconds: float, argv: Sequence[str]
) -> int:
    """Run the steps; return 1 when one of them failed."""
    if setting.dry_run:
        say(DRY_RUN_NOTE)
    command = " ".join(["python", "benchmark/bench_gpu.py", *map(shlex.quote, argv)])
    table = out / "gpu.md"

    def changed() -> None:
        # Also of steps that are not asked for now.
        found = (StepRecord.read(out / f"{step.name}.json") for step in STEPS)
        write_text(table, overview.markdown([record for record in found if record is not None]))

    driver = Driver(steps, out, setting, command=command, say=say, changed=changed)
    try:
        with terminate_as_interrupt():
            driver.run(seconds)
    except KeyboardInterrupt:
        say("interrupted; its processes have ended, the same command goes on")
        return 130
    finally:
        changed()
    missing = [s.name for s in steps if s.name not in {r.step for r in driver.records}]
    if missing:
        say(f"no time for: {', '.join(missing)}")
    say(f"written: {table}")
    return int(any(record.status is Status.FAILED for record in driver.records))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=25.0, help="start nothing that cannot end in this time")
    add("--out", type=Path, default=Path("bench-gpu"), help="where everything goes")
    names = [step.name for step in STEPS]
    add("--steps", nargs="+", default=names, metavar="STEP", help="default: all")
    add("--list", action="store_true", help="name the steps and end")
    add(
        "--dry-run-cpu",
        action="store_true",
        help="run every step on this CPU with a tiny model and tiny counts, to find faults",
    )
    add("--model-path", help="default: the shape of Llama-3.1-8B with dummy weights")
    add("--load-format", default="dummy", help="SGLang's flag")
    add("--attention-backend", default="flashinfer", help="SGLang's flag")
    add("--sampling-backend", default="pytorch", help="SGLang's flag")
    add("--server-flags", default="", metavar="'FLAGS'", help="for every server alike")
    return parser.parse_args(argv)


def say(text: str) -> None:
    """Tell whoever watches."""
    print(f"bench_gpu: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
