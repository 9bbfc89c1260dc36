"""What offline work is billed, and to whom: arithmetic by hand, and whole simulated runs."""

from __future__ import annotations

import random

import pytest

from sglang_coserve.core.control.bill import Bill, Delay
from sglang_coserve.core.step import JobTokens


def of(bill: Bill) -> dict[str | None, float]:
    report = bill.report()
    return {**report.jobs, None: report.unowned_s}


def test_the_first_token_is_charged_to_what_ran_before_it_and_the_rest_to_what_ran_after() -> None:
    bill = Bill()
    bill.worked(9.0, [JobTokens("old", 1)])
    bill.period_begins(beside_offline=False)
    arrived = bill.mark()
    bill.worked(0.4, [JobTokens("a", 3), JobTokens(None, 1)])
    first = bill.mark()
    bill.worked(0.1, [JobTokens("b", 5)])
    assert bill.charge(Delay(ttft_s=0.2, total_s=0.5), arrived, first)
    assert of(bill) == pytest.approx({"a": 0.15, None: 0.05, "b": 0.3})
    report = bill.report()
    assert (report.requests, report.ttft_s) == (1, 0.2)
    assert report.gaps_s == pytest.approx(0.3)
    assert report.total_s == pytest.approx(0.5)


def test_a_gap_that_makes_up_for_an_earlier_one_takes_its_delay_back() -> None:
    bill = Bill()
    arrived = bill.mark()
    bill.worked(1.0, [JobTokens("a", 1)])
    first = bill.mark()
    bill.worked(1.0, [JobTokens("a", 1)])
    bill.charge(Delay(ttft_s=1.0, total_s=0.25), arrived, first)
    assert of(bill) == pytest.approx({"a": 0.25, None: 0.0})
    assert bill.report().gaps_s == -0.75


def test_who_waits_only_for_requests_that_were_late_is_charged_to_what_made_them_late() -> None:
    bill = Bill()
    bill.period_begins(beside_offline=False)
    bill.worked(1.0, [JobTokens("a", 1)])
    after = bill.mark()
    bill.charge(Delay(0.5, 0.5), after, after)
    assert of(bill) == pytest.approx({"a": 0.5, None: 0.0})


def test_without_offline_work_nobody_is_billed() -> None:
    bill = Bill()
    bill.worked(1.0, [JobTokens("a", 1)])
    bill.period_begins(beside_offline=False)
    bill.worked(0.0, ())
    assert not bill.charge(Delay(0.5, 0.5), bill.mark(), bill.mark())
    assert bill.report().requests == 0
    assert of(bill) == {None: 0.0}


def test_a_step_that_is_suspended_counts_before_it_is_told_of() -> None:
    bill = Bill()
    bill.worked(1.0, [JobTokens("a", 1)])
    bill.period_begins(beside_offline=True)
    assert bill.charge(Delay(0.5, 0.5), bill.mark(), bill.mark())
    assert of(bill) == pytest.approx({"a": 0.5, None: 0.0})


def test_work_of_which_nobody_says_whose_it_is_is_no_batchs() -> None:
    bill = Bill()
    arrived = bill.mark()
    bill.worked(1.0, ())
    bill.charge(Delay(0.5, 0.5), arrived, bill.mark())
    assert of(bill) == {None: 0.5}


def test_shares_add_up_and_only_the_latest_jobs_are_remembered() -> None:
    rng = random.Random(1)
    bill = Bill()
    total_s = 0.0
    for number in range(2000):
        bill.period_begins(beside_offline=False)
        arrived = bill.mark()
        jobs = [JobTokens(f"job-{number + n}", rng.randint(1, 9)) for n in range(3)]
        bill.worked(rng.random(), jobs)
        delay = Delay(rng.uniform(-0.1, 0.5), rng.uniform(-0.1, 1.0))
        bill.charge(delay, arrived, bill.mark())
        total_s += delay.total_s
        if number == 100:
            assert sum(of(bill).values()) == pytest.approx(total_s)
    report = bill.report()
    assert report.total_s == pytest.approx(total_s)
    assert len(report.jobs) == 256
    assert "job-2001" in report.jobs and "job-5" not in report.jobs


def test_it_is_as_large_as_the_jobs_that_ran_last_however_many_there_were() -> None:
    """An online request is always in, so that the busy period never ends."""
    bill = Bill()
    bill.period_begins(beside_offline=False)
    old = bill.mark()
    for number in range(3000):
        bill.worked(1.0, [JobTokens(f"job-{number}", 1), JobTokens("long", 1)])
    assert len(bill.mark()) == 256
    recent = bill.mark()
    bill.worked(1.0, [JobTokens("job-0", 1), JobTokens("long", 3)])
    # What is no longer told apart is not charged again when it comes back.
    bill.charge(Delay(8.0, 12.0), recent, bill.mark())
    assert of(bill)["job-0"] == pytest.approx(2.0 + 4.0 * 0.25 / sum(bill.mark().values()))
    for _ in range(10):
        bill.charge(Delay(1.0, 2.0), old, bill.mark())
    assert len(bill.report().jobs) <= 256
    assert sum(of(bill).values()) == pytest.approx(32.0)


def test_requests_that_arrive_between_two_steps_share_what_is_noted_for_them() -> None:
    bill = Bill()
    first, second = bill.mark(), bill.mark()
    assert first is second
    bill.worked(1.0, [JobTokens("a", 1)])
    assert (first, bill.mark()) == ({}, {"a": 1.0})


@pytest.mark.parametrize("in_use", [0, 255])
def test_few_requests_are_noted_to_the_step(in_use: int) -> None:
    bill = Bill()
    for number in range(1, 50):
        bill.worked(1.0, [JobTokens("a", 1)])
        assert bill.mark(in_use) == {"a": number}


def test_the_marks_of_a_new_period_are_none_of_the_last_one() -> None:
    bill = Bill()
    bill.worked(1.0, [JobTokens("a", 1)])
    assert bill.mark(9999) == {"a": 1.0}
    bill.period_begins(beside_offline=False)
    assert bill.mark(9999) == {}


@pytest.mark.parametrize("in_use", [0, 300, 9999])
def test_the_work_between_two_marks_of_a_request_is_charged(in_use: int) -> None:
    """However many others are tracked: otherwise all jobs of the busy period would be charged."""
    bill = Bill()
    bill.worked(1000.0, [JobTokens("old", 1)])
    for _ in range(5):
        arrived = bill.mark(in_use)
        bill.worked(1.0, [JobTokens("new", 1)])
        bill.charge(Delay(1.0, 1.0), arrived, bill.mark(in_use, arrived))
    jobs_s = bill.report().jobs
    assert jobs_s["new"] == pytest.approx(5.0)
