"""Step ``tests``: the tests that need a GPU, each with what it said."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Final

from coserve_bench.table import markdown_table
from gpu.task import RefusedError, Task, run_step
from sglang_coserve.errors import ServerError
from sglang_coserve.srt import cpu

_ROOT: Final = Path(__file__).resolve().parents[2]
_CASES: Final = "test/srt/safepoint_cuda"
_SPARE_S: Final = 40.0
_MESSAGE: Final = 500


def measure(task: Task) -> bool:
    """Run them once; what fails is in the table, and is no failure of the step."""
    if not cpu.has_cuda() and not task.dry_run:
        raise RefusedError("there is no CUDA device")
    report = task.folder / "junit.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(_ROOT), "-c"]
    command += [str(_ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-m", "gpu"]
    code = task.run([*command, f"--junitxml={report}", str(_ROOT / _CASES)], spare_s=_SPARE_S)
    if not report.exists():
        raise ServerError(f"pytest ended with {code} and no report; see the log")
    cases = [case_of(element) for element in ET.parse(report).iter("testcase")]
    counts = {
        o: sum(case["outcome"] == o for case in cases) for o in ("passed", "failed", "skipped")
    }
    figures = {**counts, "cases": cases}
    task.report(figures, table(cases))
    return code in (0, 1, 5)


def case_of(element: ET.Element) -> dict[str, Any]:
    """Return a test's name, how it ended and why."""
    outcome, message = "passed", ""
    for child in element:
        if child.tag in ("failure", "error"):
            outcome, message = "failed", child.get("message", "")
        elif child.tag == "skipped":
            outcome, message = "skipped", child.get("message", "")
    return {
        "name": element.get("name"),
        "outcome": outcome,
        "seconds": float(element.get("time", 0)),
        "message": message[:_MESSAGE],
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Return all tests."""
    cells = [
        [c["name"], c["outcome"], f"{c['seconds']:.1f}", " ".join(c["message"].split())[:120]]
        for c in cases
    ]
    return markdown_table(("test", "outcome", "s", "message"), cells)


if __name__ == "__main__":
    sys.exit(run_step(measure))
