"""Measure the least time of a forward pass of N prompt tokens and M decodes on this machine.

    cd benchmark && python -m gpu.launch_floor --model-path MODEL --out FLOOR.json --server FLAGS...

A pass takes as long as its computation on the device or its launch by the host, the longer of the
two. The host of a virtual machine may be slow for seconds at a time. Repeating one batch ten times
in a row hides such a spell, so every round runs each batch once, after a *probe*: a prefill of a
few tokens, which lasts as long as its launch. ``median, fast host`` counts passes behind a
probe of at most 1.2 times the shortest probe.

Passes run alone and are timed from the prepared batch to its tokens on the host. Under overlap
scheduling the launch of a pass runs beside the pass before, where nothing is read from the device.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.results import write_json
from sglang_coserve.errors import CoserveError
from sglang_coserve.profiler.shapes import ExecutorLimits, ShapeExecutor, StepShape
from sglang_coserve.terminal import INTERRUPTED, markdown_table, terminate_as_interrupt

PROBE: Final = StepShape(prefills=((16, 0),))
CONTEXT_TOKENS: Final = 4224
"""Cached tokens of each decode: ConServe's prompts and half of their outputs."""

DECODES: Final = 25
"""Decodes beside prompts: online requests at 2 req/s with outputs of 256 tokens."""

_MOST_DECODES: Final = 64
_FAST_HOST: Final = 1.2
"""Longest probe of a fast host, as a multiple of the shortest probe."""

_BATCHES: Final = (
    # Prompt tokens, decodes, whether half of CONTEXT_TOKENS is cached before the prompt tokens.
    *((0, decodes, False) for decodes in (4, DECODES, _MOST_DECODES)),
    *((tokens, 0, False) for tokens in (64, 256, 512, 1024, 2048)),
    # Just above a size of CUDA graphs: the pass computes the next size.
    (1028, 0, False),
    *((tokens, 0, True) for tokens in (512, 2048)),
    (64, DECODES, False),
    # With their decodes, these fill graphs of 256 to 2,048 tokens.
    *((tokens - DECODES, DECODES, True) for tokens in (256, 512, 1024, 2048)),
)


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One run of a batch."""

    at_s: float
    """When it began, in seconds since the first pass."""

    probe_s: float
    """Time of the probe just before."""

    seconds: float


@dataclass(slots=True)
class Floor:
    """A batch and its runs, one for each round."""

    prompt_tokens: int
    decodes: int
    shape: StepShape
    runs: list[TimedPass] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Prompt tokens and decodes, as in ``231 + 25, prefix``."""
        has_prefix = any(context for _, context in self.shape.prefills)
        return f"{self.prompt_tokens} + {self.decodes}" + (", prefix" if has_prefix else "")

    def fast_host_s(self, probe_s: float) -> float | None:
        """Return the median time of the runs beside probes of at most ``probe_s``; None: none."""
        fast = [run.seconds for run in self.runs if run.probe_s <= probe_s]
        return statistics.median(fast) if fast else None


def plan_floors(limits: ExecutorLimits) -> list[Floor]:
    """Return the batches to measure; batches beyond ``limits`` are left out.

    An engine with little memory or short requests has shorter contexts.
    """
    shared_tokens = limits.kv_capacity_tokens // (_MOST_DECODES + DECODES)
    context = min(CONTEXT_TOKENS, limits.max_request_tokens // 2, shared_tokens)
    floors = []
    for prompt_tokens, decodes, has_prefix in _BATCHES:
        prefix = context // 2 if has_prefix else 0
        prefills = ((prompt_tokens, prefix),) if prompt_tokens else ()
        floor = Floor(prompt_tokens, decodes, StepShape(prefills, (context,) * decodes))
        if limits.allow(floor.shape):
            floors.append(floor)
    return floors


def measure_rounds(
    executor: ShapeExecutor,
    floors: Sequence[Floor],
    *,
    rounds: int,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int]:
    """Run all batches once in each round and add the runs to them; yield the number of each round.

    No round begins after ``limit_s``, but for the first. Each batch runs once more before, to warm
    up.

    Raises:
        ServerError: the engine failed on a batch.
    """
    for floor in floors:
        executor.run(floor.shape)
    executor.run(PROBE)
    began_s = clock()
    for number in range(1, rounds + 1):
        for floor in floors:
            probe_s = executor.run(PROBE)
            at_s = clock() - began_s
            floor.runs.append(TimedPass(at_s, probe_s, executor.run(floor.shape)))
        yield number
        if clock() - began_s > limit_s:
            return


def figures(floors: Sequence[Floor]) -> dict[str, Any]:
    """Return the figures of the batches that ran, as JSON values; times in ms.

    ``us_per_prompt_token`` is the price of a prompt token beside the decodes of its batch: the
    median time above the time of the decodes alone, both on a fast host, for each prompt token.
    """
    measured = [floor for floor in floors if floor.runs]
    probes_s = [run.probe_s for floor in measured for run in floor.runs]
    fast_s = _FAST_HOST * min(probes_s, default=0.0)
    alone_s: dict[int, float | None] = {0: 0.0}
    for floor in measured:
        if not floor.prompt_tokens:
            alone_s[floor.decodes] = floor.fast_host_s(fast_s)
    rows = []
    for floor in measured:
        times_s = [run.seconds for run in floor.runs]
        row = {
            "batch": floor.name,
            "prompt_tokens": floor.prompt_tokens,
            "decodes": floor.decodes,
            "prefix_tokens": sum(context for _, context in floor.shape.prefills),
            "context_tokens": max(floor.shape.decodes, default=0),
            "least_ms": 1e3 * min(times_s),
            "median_ms": 1e3 * statistics.median(times_s),
            "most_ms": 1e3 * max(times_s),
        }
        if (fast_host_s := floor.fast_host_s(fast_s)) is not None:
            row["fast_host_ms"] = 1e3 * fast_host_s
            base_s = alone_s.get(floor.decodes)
            if floor.prompt_tokens and base_s is not None:
                row["us_per_prompt_token"] = 1e6 * (fast_host_s - base_s) / floor.prompt_tokens
        row["runs"] = [
            {"at_s": run.at_s, "probe_ms": 1e3 * run.probe_s, "ms": 1e3 * run.seconds}
            for run in floor.runs
        ]
        rows.append(row)
    if not probes_s:
        return {"batches": rows}
    num_fast = sum(probe_s <= fast_s for probe_s in probes_s)
    probe = {
        "least_ms": 1e3 * min(probes_s),
        "median_ms": 1e3 * statistics.median(probes_s),
        "most_ms": 1e3 * max(probes_s),
        "fast_share": num_fast / len(probes_s),
    }
    return {"batches": rows, "probe": probe}


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown, with notes on the backend and on the host."""
    columns = ("prompt tokens + decodes", "least ms", "median", "most", "median, fast host")
    rows = [
        [
            row["batch"],
            *(f"{row[f'{name}_ms']:.2f}" for name in ("least", "median", "most")),
            f"{row['fast_host_ms']:.2f}" if "fast_host_ms" in row else "–",
            f"{row['us_per_prompt_token']:.1f}" if "us_per_prompt_token" in row else "–",
        ]
        for row in found["batches"]
    ]
    lines = [markdown_table((*columns, "µs a prompt token"), rows, equal_widths=True)]
    notes = [f"Attention backend in effect: {found['attention_backend'] or 'unknown'}."]
    if probe := found.get("probe"):
        notes.append(
            f"Probe: {probe['least_ms']:.2f} to {probe['most_ms']:.2f} ms, median "
            f"{probe['median_ms']:.2f}; the host was fast beside {probe['fast_share']:.0%} of the "
            "passes."
        )
    return "\n\n".join([*lines, " ".join(notes)])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-path", required=True)
    add("--out", type=Path, required=True, help="JSON file; the table goes beside it as .md")
    add("--rounds", type=int, default=12, help="most rounds (default: %(default)s)")
    add("--limit-s", type=float, default=25.0, help="begin no round later (default: %(default)s)")
    add("--server", nargs=argparse.REMAINDER, default=[], help="flags of SGLang's server")
    args = parser.parse_args(argv)
    for name in ("rounds", "limit_s"):
        if not getattr(args, name) > 0:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} {getattr(args, name):g}: it must be a positive number")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status. Ctrl-C keeps the passes until then."""
    from sglang_coserve.srt.executor_process import ExecutorProcesses

    args = parse(argv)
    flags = ["--model-path", args.model_path, "--log-level", "error", *args.server]
    found: dict[str, Any] = {"command": shlex.join(["launch_floor.py", *argv]), "rounds": 0}
    status = 0
    try:
        with terminate_as_interrupt(), ExecutorProcesses(flags) as executor:
            machine = executor.machine
            found["hardware"] = machine.hardware
            found["sglang"] = machine.sglang_version
            found["attention_backend"] = machine.attention_backend
            floors = plan_floors(executor.limits)
            try:
                measured = measure_rounds(
                    executor, floors, rounds=args.rounds, limit_s=args.limit_s
                )
                for number in measured:
                    found["rounds"] = number
            finally:
                found |= figures(floors)
    except CoserveError as error:
        print(f"launch_floor: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("launch_floor: interrupted", file=sys.stderr)
        status = INTERRUPTED
    if found.get("batches"):
        write_json(args.out, found)
        args.out.with_suffix(".md").write_text(table(found) + "\n")
        print(table(found))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
