"""All steps of a folder as one Markdown file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpu.record import Status, StepRecord
from gpu.setting import DRY_RUN_NOTE

__all__ = ["markdown"]


def markdown(records: Sequence[StepRecord]) -> str:
    """Return how every step stands, then the tables of each."""
    return "\n".join(_lines(records)).rstrip() + "\n"


def _lines(records: Sequence[StepRecord]) -> Iterator[str]:
    yield "# Steps on one GPU"
    yield ""
    if any(record.dry_run for record in records):
        yield f"**{DRY_RUN_NOTE}**"
        yield ""
    yield "| step | | state | attempts | s |"
    yield "|---|---|---|--:|--:|"
    for record in records:
        state = (
            f"{record.status.value}: {record.problem}" if record.problem else record.status.value
        )
        yield (
            f"| {record.step} | {record.question} | {_one_line(state)} | {record.attempts} | "
            f"{record.seconds:.0f} |"
        )
    for record in records:
        yield ""
        yield f"## {record.step}: {record.question}"
        yield ""
        yield f"`{record.command}`{_machine(record)}"
        for table in record.measured.get("tables", ()):
            yield ""
            yield table
        if record.status is Status.FAILED:
            yield ""
            yield "```text"
            yield from record.log_tail
            yield "```"


def _machine(record: StepRecord) -> str:
    machine = record.measured.get("machine")
    if not machine:
        return ""
    device = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores, no GPU"
    return (
        f" on {device}; SGLang {machine['sglang']}, torch {machine['torch']}, "
        f"sglang_coserve {machine['sglang_coserve']} ({machine['commit']})"
    )


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
