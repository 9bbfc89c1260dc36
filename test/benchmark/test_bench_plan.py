"""Which runs there are, in which order, with which targets and server flags."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bench_cases import online

from common.stock import best_setting
from coserve_bench.options import parse_options
from coserve_bench.plan import plan_runs
from coserve_bench.slo import SloRule, targets_of
from coserve_bench.systems import BASELINE, SYSTEMS, server_flags
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets

FIVE = [
    SYSTEMS[name]
    for name in ("stock-fcfs", BASELINE, "stock-priority", "non-preemptive", "coserve")
]
P99 = SloRule("p99")


def test_every_run_is_planned_once_and_slos_multiply_only_the_systems_that_take_one() -> None:
    runs = plan_runs(FIVE, [0.2, 0.8], 3, [P99, SloRule("p99", 1.2)])
    assert len(set(runs)) == len({run.name for run in runs}) == len(runs) == 3 * 2 * (4 + 2)
    assert Counter(run.system for run in runs)["coserve"] == 12


def test_the_baseline_comes_first_of_all_and_the_order_rotates() -> None:
    runs = plan_runs(FIVE, [0.5], 5, [P99])
    leaders = [next(run for run in runs if run.repeat == n).system for n in range(1, 6)]
    assert leaders[0] == BASELINE
    assert sorted(leaders) == sorted(system.name for system in FIVE)


def test_repeats_follow_each_other_and_the_loads_of_a_system_stand_together() -> None:
    runs = plan_runs(FIVE, [0.2, 0.5, 0.8], 2, [P99])
    assert [run.repeat for run in runs] == sorted(run.repeat for run in runs)
    for start in range(0, len(runs), 3):
        assert len({run.system for run in runs[start : start + 3]}) == 1


def test_targets_are_the_median_over_the_baseline_runs() -> None:
    runs = [[online(ttft_s, gap_s)] for ttft_s, gap_s in ((1, 0.1), (3, 0.3), (2, 9.0))]
    p99, mean = targets_of(SloRule("p99", 2.0), runs), targets_of(SloRule("mean-tpot", 1.5), runs)
    assert p99 is not None and mean is not None
    assert (p99.ttft_s, p99.tpot_s) == pytest.approx((4.0, 0.6))
    assert mean.ttft_s is None and mean.tpot_s == pytest.approx(0.45)


def test_fixed_targets_need_no_baseline_and_others_do() -> None:
    by_hand = SloTargets(0.3, None)
    assert targets_of(SloRule("fixed", targets=by_hand), []) == by_hand
    assert targets_of(P99, []) is None


def test_a_server_is_told_targets_and_profile_only_when_it_uses_them() -> None:
    targets, profile = SloTargets(0.25, None), Path("p.json")
    ours = server_flags(SYSTEMS["coserve"], ["--tp", "2"], targets, profile)
    assert ours[:2] == ("--tp", "2")
    assert ours[ours.index("--slo-ttft-ms") + 1] == "250.000" and "--slo-tpot-ms" not in ours
    assert "--latency-profile" in ours
    stock = server_flags(SYSTEMS["stock-priority"], ["--tp", "2"], targets, profile)
    assert stock == ("--tp", "2", "--enable-priority-scheduling")


def test_stock_tuned_stands_for_every_chunk_size() -> None:
    options = parse_options(["--systems", "stock-tuned"])
    found = {system.name: system.flags for system in options.systems if not system.is_ours}
    assert [name.rpartition("-")[2] for name in found] == ["128", "256", "512", "1024", "2048"]
    mixed = ("--enable-priority-scheduling", "--enable-mixed-chunk")
    assert found["stock-tuned-256"] == (*mixed, "--chunked-prefill-size", "256")


@pytest.mark.parametrize("version", ["0.5.18", "0.5.19", "0.5.23"])
def test_a_decode_interval_is_refused_where_sglang_has_none(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"sglang": version}.__getitem__)
    if version == "0.5.18":
        with pytest.raises(ConfigError, match=r"0\.5\.19 and later; 0\.5\.18 is"):
            parse_options(["--systems", "stock-interleaved"])
    else:
        systems = parse_options(["--systems", "stock-interleaved"]).systems
        assert systems[-1].flags[1:] == (
            *("--prefill-decode-interval", "1"),
            *("--chunked-prefill-size", "2048"),
        )


def test_of_the_settings_tried_the_best_ttft_at_as_many_offline_tokens_counts() -> None:
    tried = {"small": (100.0, 50.0), "middle": (200.0, 90.0), "large": (400.0, 120.0)}
    assert best_setting(tried, 80.0) == "middle"
    assert best_setting(tried, 0.0) == "small"
    assert best_setting(tried, 500.0) == "large"


def test_the_baseline_is_always_among_the_systems() -> None:
    options = parse_options(["--systems", "coserve", "coserve"])
    assert [system.name for system in options.systems] == [BASELINE, "coserve"]


def test_slo_flags_become_rules() -> None:
    derived = parse_options(["--slo-scale", "1", "1.2", "--slo-mean-tpot", "1.5"])
    assert [rule.name for rule in derived.rules] == ["p99x1", "p99x1.2", "mean-tpotx1.5"]
    by_hand = parse_options(["--slo-ttft-ms", "300"])
    assert [rule.targets for rule in by_hand.rules] == [SloTargets(0.3, None)]


def test_more_loads_repeats_and_systems_belong_to_the_same_measurement() -> None:
    first = parse_options(["--repeats", "1"])
    more = parse_options(["--repeats", "5", "--systems", "hygen", "--online-load", "0.9"])
    other = parse_options(["--window", "60"])
    assert first.of_measurement() == more.of_measurement() != other.of_measurement()


@pytest.mark.parametrize(
    "flags",
    [
        ["--systems", "nobody"],
        ["--repeats", "0"],
        ["--online-load", "0"],
        ["--slo-scale", "-1"],
        ["--offline-file", "not-there.jsonl"],
        ["--ooco"],
    ],
)
def test_bad_settings_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_options(flags)
