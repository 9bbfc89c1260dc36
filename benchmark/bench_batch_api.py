"""What the Batch API costs and withstands, measured on a real server.

    python benchmark/bench_batch_api.py --out results

Writes ``results.json`` and ``table.md``, after each part, so that Ctrl-C loses only the one
under way. ``--parts`` chooses; docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markdown import Markdown

from batch_bench import first_request, memory, overhead, upload_online, validate
from batch_bench.options import PARTS, BatchBenchOptions, parse_options
from batch_bench.setting import Setting
from common.batch_server import BatchServer
from common.failures import exit_status
from common.figures import Figure, all_met, markdown
from common.model import prepare_model
from common.results import write_results
from sglang_coserve.progress_bar import progress_bar

ON_A_SERVER: Final[Mapping[str, Callable[[BatchServer, Setting], list[Figure]]]] = {
    "validate": validate.measure,
    "first-request": first_request.measure,
    "upload-online": upload_online.measure,
    "memory": memory.measure,
}
ON_THEIR_OWN: Final[Mapping[str, Callable[[Setting], list[Figure]]]] = {
    "overhead": overhead.measure,
}


def measure(part: str, setting: Setting) -> list[Figure] | str:
    """Return the figures of a part, or why there are none: the others must not be lost with it."""
    try:
        if part in ON_THEIR_OWN:
            return ON_THEIR_OWN[part](setting)
        options = setting.options
        mib = max(options.memory_mb, options.upload_mb, 1000)
        lines = max(options.memory_lines, options.validate_lines)
        limits = ("--batch-max-upload-mib", str(mib), "--batch-max-lines", str(lines))
        with setting.server(part, *limits) as server:
            return ON_A_SERVER[part](server, setting)
    except Exception as error:
        (setting.logs / f"{part}.traceback").write_text(traceback.format_exc())
        return f"{type(error).__name__}: {error}"


def run(options: BatchBenchOptions, console: Console) -> bool:
    """Measure every part and write what came of it; return whether all targets were met."""
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Figure] | str] = {}
    with tempfile.TemporaryDirectory() as directory, progress_bar() as progress:
        work = Path(directory)
        model = prepare_model(options.model_path, work)
        setting = Setting(options, model, work, logs, progress)
        for part in options.parts:
            found[part] = measure(part, setting)
            write(options, found)
    console.print(Markdown((options.out / "table.md").read_text()))
    figures = [f for result in found.values() for f in result if isinstance(f, Figure)]
    return all(not isinstance(result, str) for result in found.values()) and all_met(figures)


def write(options: BatchBenchOptions, found: Mapping[str, list[Figure] | str]) -> None:
    """Write the figures so far."""
    parts = {part: found[part] for part in PARTS if part in found}
    write_results(
        options.out / "results.json",
        options,
        parts={
            part: {"failed": result} if isinstance(result, str) else [f.to_dict() for f in result]
            for part, result in parts.items()
        },
    )
    figures = [f for result in parts.values() if not isinstance(result, str) for f in result]
    failures = [f"{part} failed: {r}\n" for part, r in parts.items() if isinstance(r, str)]
    (options.out / "table.md").write_text("\n".join([markdown(figures), "", *failures]))


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""

    def measure_all() -> bool:
        options = parse_options(argv)
        is_met = run(options, Console())
        print(f"written: {options.out}", file=sys.stderr)
        return is_met

    return exit_status(measure_all, interrupted="; the servers have ended")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
