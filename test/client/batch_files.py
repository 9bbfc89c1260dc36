"""Batch files for the tests: to write them, and to read what came of them."""

from __future__ import annotations

from pathlib import Path

from sglang_coserve.client import BatchResult, read_results


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(text + "\n" for text in lines), encoding="utf-8")
    return path


def results_by_line(output: Path) -> dict[int, BatchResult]:
    """All results of an output and its error file; fails when a line has two."""
    by_line: dict[int, BatchResult] = {}
    for result in read_results(output):
        assert result.line not in by_line, f"line {result.line} has two records"
        by_line[result.line] = result
    return by_line
