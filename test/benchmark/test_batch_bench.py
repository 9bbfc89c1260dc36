"""The Batch API's benchmark: its inputs, its command line, what it makes of results."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench_batch_api
from batch_bench.options import PARTS, parse_options
from batch_bench.setting import Setting
from common.batch_server import openai_client, upload
from common.figures import Figure, markdown
from common.input_file import COMPLETIONS, long_lines, write_lines
from common.model import ServedModel
from common.null_server import NullServer
from sglang_coserve.errors import ConfigError
from sglang_coserve.jsonl.check_file import CheckLimits, check_file
from sglang_coserve.progress_bar import progress_bar

LIMITS = CheckLimits(max_lines=10_000, max_line_bytes=1 << 20, max_faults=10)


def num_requests(path: Path) -> int:
    """Lines of a file that the server would take."""
    with path.open("rb") as file:
        report = check_file(file, COMPLETIONS, LIMITS)
    assert report.faults == []
    return report.requests


@pytest.mark.parametrize("line_bytes", [500, 4000])
def test_long_lines_have_the_size_asked_for(tmp_path: Path, line_bytes: int) -> None:
    path = tmp_path / "in"
    long_lines(path, 1000, 1000 * line_bytes)
    assert path.stat().st_size == pytest.approx(1000 * line_bytes, rel=0.01)
    assert num_requests(path) == 1000


def test_lines_differ_and_are_the_same_again(tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "prompt_tokens": 16, "output_tokens": 4}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_lines(tmp_path / name, 20, seed=seed, **sizes)
    contents = [(tmp_path / name).read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]
    assert num_requests(tmp_path / "a") == 20


def test_a_server_without_work_takes_an_upload_of_any_size_and_again(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with NullServer(is_idle=True) as sink, openai_client(sink.base_url) as client:
        for size_bytes in (0, 10, 5_000_000):
            path.write_bytes(bytes(size_bytes))
            assert upload(client, path) == "file-null"


def test_a_part_that_fails_is_told_and_ends_nothing(tmp_path: Path) -> None:
    options = parse_options(["--quick", "--out", str(tmp_path), "--ready-timeout", "0.01"])
    model = ServedModel(str(tmp_path / "none"), 512, 1024)
    with progress_bar() as progress:
        setting = Setting(options, model, tmp_path, tmp_path, progress)
        told = bench_batch_api.measure("validate", setting)
    assert isinstance(told, str)
    assert told.startswith("StartupError: the server was not ready")
    assert "StartupError" in (tmp_path / "validate.traceback").read_text()


def test_a_figure_is_judged_by_its_median() -> None:
    assert Figure("rate", "lines/s", (1.0, 60.0, 70.0), at_least=50).is_met is True
    assert Figure("delay", "ms", (100.0, 300.0, 400.0), at_most=200).is_met is False
    assert Figure("lost", "", (0,), at_most=0).is_met is True
    assert Figure("size", "MB", (5.0,)).is_met is None
    with pytest.raises(AssertionError):
        Figure("nothing", "", ())


def test_the_table_shows_medians_ranges_and_targets() -> None:
    figures = [
        Figure("validation", "lines/s", (90_000.0, 80_000.0, 100_000.0), at_least=50_000),
        Figure("lost", "", (3,), at_most=0),
    ]
    _, _, first, second = markdown(figures).splitlines()
    assert first == "| validation | 90,000 lines/s | 80,000–100,000 | 3 | ≥ 50,000 | yes |"
    assert second == "| lost | 3 |  | 1 | ≤ 0 | **no** |"


def test_options_are_for_the_record_unless_said_otherwise() -> None:
    options = parse_options([])
    assert options.parts == PARTS
    assert (options.repeats, options.upload_mb, options.upload_lines) == (5, 200, 50_000)
    full = parse_options(["--full", "--parts", "overhead", "memory", "validate"])
    assert full.parts == ("validate", "overhead", "memory")
    assert (full.memory_lines, full.memory_mb) == (1_000_000, 2000)
    quick = parse_options(["--quick", "--memory-mb", "7"])
    assert (quick.repeats, quick.memory_mb) == (1, 7)


@pytest.mark.parametrize("flag", ["--repeats", "--upload-mb", "--online-rate", "--serve"])
def test_options_that_measure_nothing(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} must be greater than 0"):
        parse_options([flag, "0"])
