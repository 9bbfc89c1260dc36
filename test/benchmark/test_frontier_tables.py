"""Tables and picture of stored figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.results import write_json
from emulated_bench.compared import ComparedLoad, compared_loads
from emulated_bench.contenders import DEFAULT, OF_ALONE, PLAIN, pairs
from emulated_bench.dominance import Verdict, compare, dominance_table
from emulated_bench.goals import GOALS, SameGap, goals_table, same_gap
from emulated_bench.picture import draw, series_of
from emulated_bench.tables import report
from emulated_bench.tokens_at_slo import AtPair, tokens_table
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets

MIXED_512, MIXED_2048 = "stock, mixed chunks of 512", "stock, mixed chunks of 2,048"
PACE = "ours, gaps of 25 ms"
PAIR = "500 and 50 ms"
GOAL = {goal.name: goal for goal in GOALS}


def row(
    ttft_ms: float,
    gap_ms: float,
    tokens_per_s: float,
    attained: Mapping[str, float] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return a row with P99s of twice the P50s."""
    return {
        "online": 100,
        "ttft_p50_ms": ttft_ms / 2,
        "ttft_p99_ms": ttft_ms,
        "itl_p50_ms": gap_ms / 2,
        "itl_p99_ms": gap_ms,
        "tpot_p50_ms": gap_ms / 2,
        "tpot_p99_ms": gap_ms,
        "e2e_p50_ms": 1000.0,
        "online_from_cache": 0.5,
        "offline_tokens_per_s": tokens_per_s,
        "attained": {**dict.fromkeys(pairs(SloTargets()), 1.0), **(attained or {})},
        **others,
    }


def load_of(**values: Any) -> ComparedLoad:
    """Return a load of two seeds; the second has twice the latencies."""
    systems = {
        PLAIN: row(200, 20, 0),
        DEFAULT: row(210, 40, 9_000),
        PACE: row(220, 25, 9_500),
        MIXED_512: row(400, 40, 9_100, {PAIR: 0.98}),
        MIXED_2048: row(600, 90, 12_000, {PAIR: 0.5}),
        **values.pop("systems", {}),
    }
    rows = [
        {**one, "system": name, "repeat": seed, **_times(one, 1 + seed)}
        for name, one in systems.items()
        for seed in range(2)
    ]
    stored = {"name": "a, 50%", "traffic": "a", "kind": "simulated", "device": "8b", "rows": rows}
    return ComparedLoad.of({**stored, **values})


def _times(row: Mapping[str, Any], factor: float) -> dict[str, float]:
    return {key: factor * value for key, value in row.items() if key.endswith("_ms")}


def test_who_dominates_is_better_in_one_measure_and_worse_in_none() -> None:
    load = load_of(systems={PACE: row(396, 40, 9_100), "ours, worse": row(500, 41, 9_000)})
    ours = compare(load, DEFAULT, MIXED_512)
    assert (ours.verdict, ours.cell) == (Verdict.OURS, "we 2:0")
    assert ours.better == ["TTFT P50", "TTFT P99"]  # 1.1% fewer tokens are as many.
    assert compare(load, PACE, MIXED_512).verdict is Verdict.NEITHER  # 1% shorter is equal.
    worse = compare(load, "ours, worse", MIXED_512)
    assert worse.verdict is Verdict.STOCK
    assert len(worse.worse) == 5
    assert compare(load, DEFAULT, MIXED_2048).cell == "– 5:1"


def test_the_sums_of_dominance_name_the_loads() -> None:
    text = dominance_table([load_of(), load_of(name="b, 50%", systems={DEFAULT: row(900, 99, 1)})])
    assert "| a, 50% | we 2:0 | – 5:1 |" in text
    assert "| b, 50% | **it** 0:6 | **it** 0:6 |" in text
    assert "| we, neither, **it** | 1, 0, 1 | 0, 1, 1 |" in text
    expected = "| ours, default | 1 | 1 | 2 | 1 of 2 | b, 50%: mixed chunks of 512; b, 50%: mixed"
    assert expected in text


def test_tokens_count_of_systems_that_keep_the_pair() -> None:
    load = load_of()
    kept = AtPair.of(load, OF_ALONE)
    assert (kept.ours, kept.stock) == (PACE, MIXED_2048)
    assert kept.verdict == "0.79 (0.79–0.79)"
    only = AtPair.of(load, PAIR)
    assert (only.ours, only.stock, only.verdict) == (PACE, None, "only ours")
    missed = {PAIR: 0.9}
    systems = {DEFAULT: row(1, 1, 1, missed), PACE: row(1, 1, 1, missed)}
    assert AtPair.of(load_of(systems=systems), PAIR).verdict == "–"
    systems[MIXED_512] = row(1, 1, 1)
    assert AtPair.of(load_of(systems=systems), PAIR).verdict == "**only stock**"
    text = tokens_table([load])
    assert f"| {PAIR} | – | – | 0 | 1 | 0 | 0 |" in text
    assert f"| {OF_ALONE} | 0.79 | 0.79 | 1 | 0 | 0 | 0 |" in text


def test_requests_of_all_seeds_count_for_a_pair() -> None:
    load = load_of()
    rows = dict(load.rows[PACE])
    rows[1] = {**rows[1], "online": 300, "attained": {**rows[1]["attained"], PAIR: 0.96}}
    changed = ComparedLoad(load.name, "a", "simulated", "8b", {**load.rows, PACE: rows})
    assert changed.attained(PACE, PAIR) == pytest.approx(0.97)
    assert AtPair.of(changed, PAIR).ours == DEFAULT


def test_goals_compare_the_default_with_alone_and_with_stock_of_the_same_gap() -> None:
    load = load_of()
    assert same_gap(load) == SameGap(MIXED_512, MIXED_512)
    assert GOAL["P99 TTFT ÷ alone"].cell(load) == "1.05 (1.05–1.05)"
    # The P99 gap alone is 2 × the median: 40 ÷ (2.2 × 10).
    assert GOAL["P99 gap ÷ limit"].cell(load) == "**1.82 (1.82–1.82)**"
    assert GOAL["P99 TPOT ÷ alone"].is_kept(load)
    assert GOAL["offline ÷ stock"].cell(load) == "0.99 (0.99–0.99)"
    assert GOAL["P99 TTFT ÷ stock"].cell(load) == "0.53 (0.53–0.53)"
    text = goals_table([load, load_of(name="b, 50%", systems={DEFAULT: row(300, 60, 9_000)})])
    assert "| loads that keep it | 1 of 2 |" in text
    assert "| b, 50% | **1.50 (1.50–1.50)** |" in text


def test_between_two_sizes_of_chunks_stock_is_interpolated() -> None:
    load = load_of(systems={DEFAULT: row(200, 60, 9_000)})
    same = same_gap(load)
    assert same is not None
    assert same.name == "between chunks of 512 and 2,048"
    assert same.ratios(load, "itl_p99_ms") == pytest.approx([1.0, 1.0])
    assert same.share == pytest.approx(0.5)  # 60 is the geometric mean of 40 and 90.
    assert same.ratios(load, "ttft_p99_ms") == pytest.approx([200 / (400 * 600) ** 0.5] * 2)


def test_beyond_all_settings_of_stock_there_is_no_ratio() -> None:
    load = load_of(systems={DEFAULT: row(200, 120, 9_000)})
    assert same_gap(load) is None
    assert GOAL["offline ÷ stock"].cell(load) == "–"


def test_cached_tokens_are_compared_where_prompts_share_prefixes() -> None:
    cached = load_of(systems={DEFAULT: row(200, 40, 9_000, online_from_cache=0.4)})
    assert GOAL["cached ÷ alone"].cell(cached) == "**0.80 (0.80–0.80)**"
    none = load_of(systems={PLAIN: row(200, 20, 0, online_from_cache=0.0)})
    assert GOAL["cached ÷ alone"].is_kept(none) is None


def test_a_report_has_all_tables_and_rows_of_any_kind(tmp_path: Path) -> None:
    rows = [
        {"system": PLAIN, "repeat": 0, **row(200, 20, 0, bound_tokens_per_s=10_000.0)},
        {"system": DEFAULT, "repeat": 0, **row(210, 40, 9_000, suspended=3)},
    ]
    stored = {"name": "a, 50%", "traffic": "a", "kind": "emulated", "device": "8b on h100"}
    write_json(tmp_path / "settings.json", {"seconds": 1})
    write_json(tmp_path / "a.json", {**stored, "load": 0.5, "offline": [1, 2], "rows": rows})
    text = report(compared_loads(tmp_path))
    assert text.startswith("# emulated: 8b on h100: no GPU was measured")
    assert "Not compared, without a row of ours, of stock or alone: a, 50%." in text
    for head in ("Never dominated", "Tokens at an SLO", "Goals of the default", "All figures"):
        assert f"## {head}" in text
    assert "| a, 50% | ours, default | 1 | 9,000 | 0.90 | 105, 210 | 20.0, 40.0 |" in text


def test_a_folder_without_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no figures of loads"):
        compared_loads(tmp_path)


def test_the_picture_shows_the_settings_in_their_order(tmp_path: Path) -> None:
    load = load_of(
        systems={
            "ours, streams +25%": row(200, 30, 7_000),
            "ours, streams +200%": row(230, 60, 9_900),
            "stock, decodes between chunks of 2,048": row(500, 80, 10_000),
        }
    )
    slowdowns, paces, mixed, between = series_of(load)
    assert list(slowdowns.systems.values()) == ["+25%", "default", "+200%"]
    assert list(paces.systems.values()) == ["25 ms"]
    assert list(mixed.systems.values()) == ["512", "2,048"]
    assert len(between.systems) == 1
    path = tmp_path / "images" / "frontier.svg"
    draw([load], "a, 50%", path)
    text = path.read_text()
    assert "simulated: no GPU was measured. 8b, a, 50% load, medians of 2 seeds" in text
    for shown in ("P99 TTFT, ms", "P99 gap between tokens, ms", "online requests alone", "default"):
        assert shown in text
    with pytest.raises(ConfigError, match=r"no load 'b'.*there are: a, 50%"):
        draw([load], "b", path)
