"""From runs to the table: records on the disk, medians, ratios, attainment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench_cases import online, record
from hypothesis import given
from hypothesis import strategies as st

from coserve_bench.offline_bounds import OfflineBounds
from coserve_bench.options import parse_options
from coserve_bench.plan import RunKey
from coserve_bench.plots import plot_latency_ratios, plot_offline_throughput, plot_timeline
from coserve_bench.run_record import RunRecord, read_record, write_record
from coserve_bench.slo import SloRule
from coserve_bench.summary import Row, pair_ratios, searched, spread, summarize_runs
from coserve_bench.systems import BASELINE, THROUGHPUT_BOUND
from coserve_bench.table import markdown
from sglang_coserve.metrics import SloTargets
from sglang_coserve.slo_search.machine import EngineMachine

P99 = SloRule("p99")


def row_of(rows: list[Row], system: str, slo: str = "") -> Row:
    (row,) = [row for row in rows if (row.system, row.slo) == (system, slo)]
    return row


@given(
    ttft_s=st.floats(0, 100),
    gap_s=st.floats(0, 10),
    arrival_s=st.floats(0, 1000),
    tokens=st.integers(0, 50),
)
def test_a_record_survives_the_disk(
    tmp_path_factory: pytest.TempPathFactory,
    ttft_s: float,
    gap_s: float,
    arrival_s: float,
    tokens: int,
) -> None:
    path = tmp_path_factory.mktemp("runs") / "run.json"
    timeline = online(ttft_s, gap_s, arrival_s, tokens)
    written = record("coserve", [timeline], targets=SloTargets(0.1, None), offline=[timeline])
    write_record(path, written)
    read = read_record(path)
    assert (read.key, read.targets, read.offline) == (
        written.key,
        written.targets,
        written.offline,
    )
    assert read.online[0].token_times_s == pytest.approx(timeline.token_times_s, abs=1e-5)
    assert read.online[0].outcome is timeline.outcome


def test_a_second_write_changes_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write_record(first, record(BASELINE, [online(1 / 3, 1 / 7)]))
    write_record(second, read_record(first))
    assert first.read_bytes() == second.read_bytes()


def test_spread_leaves_out_what_is_undefined() -> None:
    found = spread([3.0, None, 1.0, 10.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.n) == (3.0, 1.0, 10.0, 3)
    assert spread([None]) is None


def test_ratios_pair_the_runs_of_one_repeat() -> None:
    # The machine was twice as slow in the second repeat: the ratio is 2 in both.
    assert pair_ratios({1: 2.0, 2: 4.0, 3: 5.0}, {1: 1.0, 2: 2.0}) == [2.0, 2.0]
    assert pair_ratios({1: 2.0, 2: None}, {1: 0.0, 2: 1.0}) == []


def test_rows_hold_medians_of_figures_and_of_paired_ratios() -> None:
    runs = []
    for repeat, slowness in enumerate((1.0, 2.0, 4.0), start=1):
        base, ours = [online(0.1 * slowness, 0.01)], [online(0.3 * slowness, 0.01)]
        full = [online(0.5, 0.1, arrival_s) for arrival_s in range(9)]
        runs += [
            record(BASELINE, base, repeat=repeat),
            record("coserve", ours, repeat=repeat, slo=P99.name, offline=full[:6]),
            record(THROUGHPUT_BOUND, ours, repeat=repeat, offline=full),
        ]
    rows = summarize_runs(runs, [P99])
    ours_row = row_of(rows, "coserve", P99.name)
    assert ours_row.figures["p99_ttft_ms"].median == pytest.approx(600)
    assert ours_row.ratios["p99_ttft_ms"].low == pytest.approx(3.0)
    assert ours_row.ratios["p99_ttft_ms"].high == pytest.approx(3.0)
    assert ours_row.ratios["offline_tokens_per_s"].median == pytest.approx(6 / 9)
    base_row = row_of(rows, BASELINE)
    assert base_row.ratios["p99_ttft_ms"].median == 1.0
    assert "offline_tokens_per_s" not in base_row.figures
    assert base_row.figures["total_tokens_per_s"].median == pytest.approx(13 / 10)


def test_attainment_is_judged_by_what_the_server_was_told_else_by_the_first_rule() -> None:
    ten = [online(0.1 * place, 0.01) for place in range(1, 11)]
    told = SloTargets(ttft_s=0.55)
    rows = summarize_runs(
        [
            record(BASELINE, [online(0.25, 0.01)]),
            record("coserve", ten, slo=P99.name, targets=told),
            record("stock-fcfs", ten),
        ],
        [P99, SloRule("p99", 9.0)],
    )
    ours, stock = row_of(rows, "coserve", P99.name), row_of(rows, "stock-fcfs")
    assert ours.targets == told and ours.figures["attainment"].median == pytest.approx(0.5)
    assert stock.figures["attainment"].median == pytest.approx(0.2)


def test_loads_are_apart_and_a_missing_baseline_costs_ratios_only() -> None:
    rows = summarize_runs(
        [
            record("coserve", [online(0.1, 0.01)], load=0.8, slo=P99.name),
            record("coserve", [online(0.2, 0.01)], load=0.2, slo=P99.name),
            record(BASELINE, [online(0.1, 0.01)], load=0.2),
        ],
        [P99],
    )
    assert [row.load for row in rows] == [0.2, 0.2, 0.8]
    assert rows[0].ratios["p99_ttft_ms"].median == pytest.approx(2.0)
    assert rows[2].ratios == {} and rows[2].figures["p99_ttft_ms"].median == pytest.approx(100)


def test_the_table_has_a_section_for_each_load_and_a_dash_for_what_there_is_not() -> None:
    rows = summarize_runs(
        [
            record(BASELINE, [online(0.1, 0.01)], load=load, repeat=repeat)
            for load in (0.2, 0.8)
            for repeat in (1, 2)
        ],
        [P99],
    )
    text = markdown("Title", rows)
    assert text.count("\n## ") == 2
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 * 3 and len({line.count("|") for line in lines}) == 1
    assert "| – |" in lines[2] and "100.0 / 10.0" in lines[2]


def test_the_tuned_stock_server_is_the_one_that_gets_as_much_offline_work_done() -> None:
    def run(system: str, ttft_s: float, requests: int, slo: str = "") -> RunRecord:
        offline = [online(0.5, 0.1, arrival_s) for arrival_s in range(requests)]
        return record(system, [online(ttft_s, 0.01)], slo=slo, offline=offline)

    runs = [
        record(BASELINE, [online(0.1, 0.01)]),
        run("coserve", 0.1, 5, P99.name),
        run("stock-tuned-128", 0.2, 3),
        run("stock-tuned-256", 0.3, 5),
        run("stock-tuned-512", 0.4, 7),
    ]
    rows = summarize_runs(runs, [P99])
    assert searched(rows) == {(0.5, "stock-tuned"): "stock-tuned-256"}
    assert "*stock-tuned* is `stock-tuned-256`" in markdown("Title", rows)


def test_figures_are_drawn_also_where_systems_and_slos_are_missing(tmp_path: Path) -> None:
    full = [online(0.5, 0.1, arrival_s) for arrival_s in range(9)]
    runs = [
        record(BASELINE, [online(0.1, 0.01)]),
        record("coserve", [online(0.2, 0.01)], slo=P99.name, offline=full),
        record("coserve", [online(0.3, 0.01)], slo="p99x1.2", offline=full),
        record("stock-tuned-256", [online(0.3, 0.01)], load=0.8, offline=full),
    ]
    rows = summarize_runs(runs, [P99])
    plot_latency_ratios(rows, tmp_path / "latency.png")
    plot_offline_throughput(rows, tmp_path / "throughput.png")
    plot_timeline(runs[:3], tmp_path / "timeline.png")
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_a_run_has_a_name_of_its_own() -> None:
    keys = [
        RunKey(1, 0.2, "coserve", "p99x1"),
        RunKey(1, 0.2, "coserve", "p99x1.2"),
        RunKey(1, 0.2, "coserve", "p99x1", 0.5),
        RunKey(1, 0.2, "coserve", "p99x1", 0.51),
    ]
    assert len({key.name for key in keys}) == len(keys)


def test_offline_tokens_stand_beside_the_most_that_was_possible(tmp_path: Path) -> None:
    profile = Path(__file__).parents[2] / "benchmark" / "results" / "coserve_profile_cpu.json"
    options = parse_options(["--latency-profile", str(profile), "--out", str(tmp_path)])
    full = [online(0.5, 0.01, arrival_s, 30) for arrival_s in range(9)]
    alone = record(BASELINE, [online(0.1, 0.01)])
    runs = [alone, record("coserve", [online(0.1, 0.01)], targets=SloTargets(2, 1), offline=full)]
    assert OfflineBounds.of(options, runs) is None  # Nothing is known of the engine.

    runs[0] = replace(alone, provenance={"engine": EngineMachine().to_dict()})
    bounds = OfflineBounds.of(options, runs)
    row = row_of(summarize_runs(runs, [P99], bounds), "coserve")
    bound, share = (
        row.figures[f"offline_{name}"].median for name in ("bound_tokens_per_s", "share_of_bound")
    )
    assert share == pytest.approx(row.figures["offline_tokens_per_s"].median / bound)
    assert 0 < share < 1

    # Online requests take their part of what is possible.
    busy = [online(0.1, 0.01, arrival_s / 10, 100) for arrival_s in range(90)]
    runs[1] = record("coserve", busy, targets=SloTargets(2, 1), offline=full)
    busy_row = row_of(summarize_runs(runs, [P99], bounds), "coserve")
    assert busy_row.figures["offline_bound_tokens_per_s"].median < bound
    assert (
        "offline_bound_tokens_per_s" not in row_of(summarize_runs(runs, [P99]), "coserve").figures
    )
