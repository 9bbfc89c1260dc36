"""What the docs say of placement, on fewer lines: the modelled engines are as they were."""

from __future__ import annotations

import bench_placement


def test_homes_by_prefix_keep_the_hit_rate_of_one_engine() -> None:
    options = bench_placement.parse_options(
        ["--groups", "250", "--members", "12", "--lines-each", "1"]
    )
    one = bench_placement.measured(options, 1, by_prefix=True)
    for engines in (2, 3):
        found = bench_placement.measured(options, engines, by_prefix=True)
        random = bench_placement.measured(options, engines, by_prefix=False)
        assert found.hit_rate >= 0.95 * one.hit_rate
        assert found.hit_rate > random.hit_rate
        assert found.most_by_mean < 1.2
        assert found.lines_per_s > 1.5 * one.lines_per_s
