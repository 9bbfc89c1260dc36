"""Predicted and measured time of each step, from what a server's ``--record-plans`` wrote.

    cd benchmark && python -m gpu.step_times PLANS.jsonl... --out FOLDER

A recording holds every request of every step, and the prompts: tens of MB a minute. The table keeps
one row of numbers for each step, some 20 bytes compressed, and is ``FOLDER/PLANS.csv.gz``. Printed
are the errors of the predictions by kind of step.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.results import write_json
from sglang_coserve.core.step import StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.durable_files import replace
from sglang_coserve.errors import CoserveError, InputFileError, unreadable
from sglang_coserve.recording.calls import Started, Updated
from sglang_coserve.recording.file import read_recording
from sglang_coserve.terminal import markdown_table

_DIGITS: Final = 3
"""Decimals of milliseconds: steps vary by far more than a microsecond."""

KINDS: Final = ("decode", "prefill", "mixed")
SUMMARY: Final = "summary"
"""Name of the files with the figures of a folder: ``.json`` and ``.md``."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step that ran: a row of the table. Times in ms are None where nothing is known."""

    began_s: float
    """Seconds since the first step of the recording began."""

    lane: str
    """``shared`` or ``offline``; empty for a step that the engine ran without a plan."""

    kind: str
    """``decode``, ``prefill`` or ``mixed``, by the requests that were computed."""

    predicted_ms: float | None
    measured_ms: float | None
    """Time that the step took; with overlap scheduling, since the step before ended."""

    budget_ms: float | None
    """Limit of the step's predicted time for adding offline work; None: no limit."""

    online_part_ms: float | None
    """Predicted time of the step's online work alone."""

    planning_ms: float
    """Part of the measured time in which the next batch was planned and no batch ran."""

    online_requests: int
    online_waits: bool
    """Online prompts waited when the step was planned."""

    as_planned: bool
    """The engine computed the batch of the plan. Otherwise the prediction is for another batch."""

    suspensions: int
    prefill_requests: int
    prefill_tokens: int
    prefill_context_tokens: int
    prefill_attention_pairs: int
    decode_requests: int
    decode_context_tokens: int

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where it cannot be judged."""
        if not self.as_planned or self.suspensions or not self.measured_ms:
            return None
        return None if self.predicted_ms is None else self.predicted_ms / self.measured_ms - 1


def read_step_times(lines: Iterable[bytes], source: str) -> Iterator[StepTime]:
    """Yield the steps of a recording in the order in which they ended.

    Raises:
        InputFileError: a line is malformed; the message names ``source`` and the line.
    """
    _, steps = read_recording(lines, source)
    plan = StepPlan()
    in_flight: dict[int, StepPlan] = {}
    first_s: float | None = None
    for step in steps:
        for call in step.calls:
            match call:
                case Started():
                    in_flight[plan.step] = plan
                case Updated(result):
                    own = None if result.step is None else in_flight.pop(result.step, None)
                    if not result.batch.is_empty:
                        first_s = result.started_s if first_s is None else first_s
                        yield _step_time(own, result, first_s)
        if step.planned is not None:
            plan = step.planned.plan


def _step_time(plan: StepPlan | None, result: StepResult, first_s: float) -> StepTime:
    batch = result.batch
    return StepTime(
        began_s=round(result.started_s - first_s, 6),
        lane="" if plan is None else plan.lane.value,
        kind=_kind_of(batch),
        predicted_ms=None if plan is None else _in_ms(plan.predicted_s),
        measured_ms=_in_ms(result.seconds),
        budget_ms=None if plan is None else _in_ms(plan.budget_s),
        online_part_ms=None if plan is None else _in_ms(plan.online_part_s),
        planning_ms=_in_ms(result.planning_s) or 0.0,
        online_requests=len(result.served),
        online_waits=plan is not None and plan.waits_online,
        as_planned=plan is not None and plan.batch == batch,
        suspensions=result.suspensions,
        **batch._asdict(),
    )


def _kind_of(batch: StepStats) -> str:
    if not batch.prefill_requests:
        return "decode"
    return "mixed" if batch.decode_requests else "prefill"


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else round(1e3 * seconds, _DIGITS)


def write_table(steps: Sequence[StepTime], path: Path) -> None:
    """Write the steps as compressed CSV: empty cells for None, 1 and 0 for true and false."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(field.name for field in fields(StepTime))
    for step in steps:
        cells = [int(value) if isinstance(value, bool) else value for value in astuple(step)]
        writer.writerow(cells)
    content = gzip.compress(text.getvalue().encode(), mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda file: file.write(content), 0o666)


def summarize_steps(steps: Sequence[StepTime]) -> dict[str, dict[str, float]]:
    """Return figures of each kind of step that occurs.

    ``mape`` and ``bias`` are the means of |e| and e, where e is a prediction's relative error; they
    are left out where no prediction can be judged.
    """
    total_ms = sum(step.measured_ms or 0.0 for step in steps)
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        own = [step for step in steps if step.kind == kind]
        times_ms = [step.measured_ms for step in own if step.measured_ms is not None]
        if not times_ms:
            continue
        p50_ms, p99_ms = map(float, np.percentile(times_ms, [50, 99]))
        errors = [step.error for step in own if step.error is not None]
        found[kind] = {
            "steps": len(own),
            "time_share": sum(times_ms) / total_ms if total_ms else 0.0,
            "mean_prefill_tokens": sum(step.prefill_tokens for step in own) / len(own),
            "mean_decodes": sum(step.decode_requests for step in own) / len(own),
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "judged": len(errors),
        }
        if errors:
            found[kind]["mape"] = sum(map(abs, errors)) / len(errors)
            found[kind]["bias"] = sum(errors) / len(errors)
    return found


def summary_table(summaries: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return a Markdown table of ``summarize_steps`` of several recordings, by name."""
    columns = (
        *("recording", "kind", "steps", "% of the time", "prompt tokens", "decodes"),
        *("P50 ms", "P99 ms", "error", "bias"),
    )
    rows = [
        [
            name,
            kind,
            f"{own['steps']:,}",
            f"{100 * own['time_share']:.1f}",
            f"{own['mean_prefill_tokens']:,.0f}",
            f"{own['mean_decodes']:.1f}",
            f"{own['p50_ms']:.2f}",
            f"{own['p99_ms']:.2f}",
            f"{own['mape']:.1%}" if "mape" in own else "–",
            f"{own['bias']:+.1%}" if "bias" in own else "–",
        ]
        for name, kinds in summaries.items()
        for kind, own in kinds.items()
    ]
    note = (
        "Prompt tokens and decodes: means of a step. Error and bias: means of |e| and e, where e "
        "is predicted ÷ measured − 1, over the steps that ran as planned."
    )
    return f"{markdown_table(columns, rows)}\n\n{note}"


def reduce_recording(recording: Path, table: Path) -> dict[str, dict[str, float]]:
    """Write the table of a recording; return its figures by kind of step.

    Raises:
        InputFileError: the recording cannot be read.
    """
    try:
        with recording.open("rb") as lines:
            steps = list(read_step_times(lines, str(recording)))
    except OSError as error:
        raise InputFileError(unreadable(recording, error)) from error
    write_table(steps, table)
    return summarize_steps(steps)


def reduce_folder(recordings: Path, tables: Path) -> dict[str, Any]:
    """Reduce the recordings of a folder and remove them; return the figures of all, by file name.

    A recording that cannot be read stays, with the reason in place of its figures. Figures of
    recordings that were reduced before are kept in the folder of tables.
    """
    summary = tables / f"{SUMMARY}.json"
    found: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    for recording in sorted(recordings.glob("*.jsonl")):
        try:
            kinds = reduce_recording(recording, tables / f"{recording.stem}.csv.gz")
        except CoserveError as error:
            found[recording.stem] = {"problem": str(error)}
            continue
        found[recording.stem] = kinds
        recording.unlink()
    if found:
        write_json(summary, found)
        readable = {name: kinds for name, kinds in found.items() if "problem" not in kinds}
        summary.with_suffix(".md").write_text(summary_table(readable) + "\n")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", nargs="+", type=Path, metavar="PLANS.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    args = parser.parse_args(argv)
    try:
        summaries = {
            path.stem: reduce_recording(path, args.out / f"{path.stem}.csv.gz")
            for path in args.recordings
        }
    except CoserveError as error:
        print(f"step_times: {error}", file=sys.stderr)
        return 2
    print(summary_table(summaries))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
