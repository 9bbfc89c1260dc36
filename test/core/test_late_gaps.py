"""The account of late gaps."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.late_gaps import LateGaps


def test_gaps_in_time_earn_late_ones() -> None:
    account = LateGaps()
    account.observe(32, 32)
    assert account.left < 1
    for _ in range(100):
        account.observe(32, 0)
    assert 20 < account.left < 32


def test_no_more_is_saved_than_two_late_gaps_of_each_decode() -> None:
    account = LateGaps()
    for _ in range(10_000):
        account.observe(100, 0)
    assert 199 < account.left <= 200


def test_a_service_that_is_always_late_is_not_in_debt_for_ever() -> None:
    account = LateGaps()
    for _ in range(1000):
        account.observe(10, 10)
    assert account.left < 0
    for _ in range(410):
        account.observe(10, 0)
    assert account.left > 0


def test_iterations_without_decodes_change_nothing() -> None:
    account = LateGaps()
    before = account.left
    account.observe(0, 0)
    assert account.left == before


@given(st.lists(st.integers(1, 64), min_size=1, max_size=400), st.data())
def test_whoever_spends_only_what_is_left_keeps_the_percentile(
    batches: list[int], data: st.DataObject
) -> None:
    """Late gaps are at most a hundredth, but for what may be saved up."""
    account = LateGaps()
    num_gaps = num_late = 0
    for count in batches:
        most = min(count, int(max(account.left, 0)))
        late = data.draw(st.integers(0, most))
        account.observe(count, late)
        num_gaps, num_late = num_gaps + count, num_late + late
        assert num_late <= 0.01 * num_gaps + 2 * max(batches) + 32
