"""How long answers are expected to be, from those of finished lines."""

from __future__ import annotations

from sglang_coserve.jsonl.request_line import output_limit
from sglang_coserve.lines.line_run import OutputLengths


def test_nothing_is_known_before_a_line_is_finished() -> None:
    assert OutputLengths().expected(100) is None


def test_lines_with_a_like_limit_are_alike() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.add(100, 10)
        lengths.add(1000, 400)
    assert lengths.expected(120) == round((500 + 205) / 51)
    assert lengths.expected(1000) == round((20_000 + 205) / 51)


def test_another_limit_is_expected_to_be_as_the_mean_of_all() -> None:
    lengths = OutputLengths()
    lengths.add(100, 10)
    lengths.add(100, 30)
    assert lengths.expected(None) == 20
    assert lengths.expected(5) == 5


def test_limits_of_no_use_are_taken_as_they_are() -> None:
    lengths = OutputLengths()
    lengths.add(-1, 10)
    assert lengths.expected(-1) == 0
    assert lengths.expected(output_limit({"max_tokens": "many"})) == 10
