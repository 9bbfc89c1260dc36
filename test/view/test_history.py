"""The series of samples: differences of sums, bounds, and what is not known."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_coserve.view.standing import History


def replica(seconds: float = 0.0, *, plans: bool = True, suspended: int = 0) -> dict[str, Any]:
    """A replica that has run for so long: a quarter of the time online, half offline."""
    state: dict[str, Any] = {
        "online": {
            "waiting": 1,
            "running": 2,
            "delay_s": seconds * 0.03 if plans else None,
            "delay_ttft_s": seconds * 0.02 if plans else None,
            "delay_gaps_s": seconds * 0.01 if plans else None,
            "billed": int(seconds),
        },
        "offline": {"waiting": 3, "running": 4},
        "cache": {
            "online_prompt_tokens": int(200 * seconds) if plans else None,
            "found": int(90 * seconds) if plans else None,
            "found_alone": int(100 * seconds) if plans else None,
            "protected_tokens": 7 if plans else None,
            "lease_s": 30.0 if plans else None,
        },
        "kv_tokens": {"online": 10, "offline": 20, "cached": 30, "free": 40},
    }
    if plans:
        state["work"] = {
            "steps": int(seconds),
            "online_s": seconds / 4,
            "offline_s": seconds / 2,
            "granted_s": seconds,
            "lost_s": 0.0,
            "dropped_steps": 0,
            "online_tokens": int(100 * seconds),
            "offline_tokens": int(300 * seconds),
            "retracted_tokens": 0,
        }
        state["safepoints"] = {"suspended": {"extend": suspended, "decode": 0, "mixed": 0}}
    return state


def test_sums_of_replicas_become_rates_and_their_time_is_averaged() -> None:
    history = History()
    history.add(1000.0, [replica(10.0, suspended=5), replica(20.0)])
    history.add(1002.0, [replica(12.0, suspended=9), replica(22.0)])
    columns = history.columns()
    assert columns["online_share"] == [None, 0.25]
    assert columns["offline_share"] == [None, 0.5]
    assert columns["granted_share"] == [None, 1.0]
    assert columns["offline_tokens_per_s"] == [None, 600.0]
    assert columns["suspensions_per_s"] == [None, 2.0]
    assert columns["free_kv_tokens"] == [80, 80]
    assert columns["online_waiting"] == [2, 2]


def test_the_bill_is_of_what_ended_in_this_time() -> None:
    history = History()
    assert (history.columns(), history.latest, history.bill()) == ({}, (), None)
    history.add(1000.0, [replica(100.0), replica(50.0)])
    assert history.bill() is None
    history.add(1001.0, [replica(110.0), replica(60.0)])
    bill = history.bill()
    assert bill["requests"] == 20
    assert bill["mean_ms"] == pytest.approx(30.0)
    assert bill["ttft_ms"] == pytest.approx(20.0)
    assert bill["gaps_ms"] == pytest.approx(10.0)


def test_the_cache_is_compared_over_this_time() -> None:
    history = History()
    assert history.cache() is None
    history.add(1000.0, [replica(100.0), replica(50.0)])
    assert history.cache()["share"] is None
    history.add(1001.0, [replica(110.0), replica(60.0)])
    assert history.cache() == {
        "online_prompt_tokens": 4000,
        "found": 1800,
        "found_alone": 2000,
        "share": 0.9,
        "protected_tokens": 14,
        "is_promised": True,
    }


def test_a_cache_without_leases_in_one_replica_is_not_promised() -> None:
    history = History()
    without = replica(10.0)
    without["cache"]["lease_s"] = None
    history.add(1000.0, [replica(10.0), without])
    assert history.cache()["is_promised"] is False


def test_it_is_bounded_and_asked_for_what_is_new() -> None:
    history = History(samples=5)
    for number in range(20):
        history.add(1000.0 + number, [replica(float(number))])
    assert history.columns()["at"] == [1015.0, 1016.0, 1017.0, 1018.0, 1019.0]
    assert history.columns(since_s=1017.5)["at"] == [1018.0, 1019.0]
    later = history.columns(since_s=2000.0)
    assert later["at"] == []
    assert {len(values) for values in later.values()} == {0}


def test_a_policy_that_does_not_plan_has_no_shares_and_no_bill() -> None:
    history = History()
    history.add(1000.0, [replica(plans=False)])
    history.add(1001.0, [replica(plans=False)])
    assert history.columns()["offline_share"] == [None, None]
    assert history.columns()["offline_waiting"] == [3, 3]
    assert history.columns()["online_found_tokens"] == [None, None]
    assert (history.bill(), history.cache()) == (None, None)


def test_a_scheduler_that_began_anew_gives_no_negative_rates() -> None:
    history = History()
    history.add(1000.0, [replica(100.0)])
    history.add(1001.0, [replica(0.0)])
    assert history.columns()["offline_tokens_per_s"][-1] == pytest.approx(0.0)
    assert history.cache()["found"] == 0


def test_a_replica_whose_status_has_failed_is_left_out() -> None:
    history = History()
    history.add(1000.0, [replica(10.0), {}])
    history.add(1001.0, [{}])  # No sample: its age shows that nobody says anything.
    assert (len(history.latest), history.latest_at_s) == (1, 1000.0)
    history.add(1002.0, [replica(12.0), {}])
    assert history.columns()["offline_tokens_per_s"] == [None, 300.0]
