"""The view as text: what is unknown, and what others wrote."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from sglang_coserve.view.terminal import as_line, as_tables, waiting_text


def view(**changes: Any) -> dict[str, Any]:
    """What a server says that has just started."""
    full = {
        "at": 1_700_000_000.0,
        "sample_age_s": None,
        "model": "m",
        "policy": "coserve",
        "online_users": {
            "level": "unknown",
            "text": "No online request has ended in the last 10 minutes.",
            "requests": 0,
            "slos": [],
            "bill": None,
        },
        "replicas": [],
        "decisions": [],
        "history": {},
        "batches": None,
        "headroom": None,
    }
    return full | changes


def shown(of: dict[str, Any], width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(as_tables(of))
    return out.getvalue()


@pytest.mark.parametrize(
    ("age_s", "told"),
    [(None, "has not answered yet"), (90.0, "the engine has not answered for 90 s")],
)
def test_a_server_that_has_not_answered_is_shown(age_s: float | None, told: str) -> None:
    silent = view(sample_age_s=age_s)
    line, text = as_line(silent), shown(silent, 200)
    assert "unknown" in line
    assert "\n" not in line
    assert "--coserve-data-dir" in text
    assert all(told in each for each in (line, text))


USERS = {
    "level": "ok",
    "text": "Fine.",
    "bill": {"requests": 5, "mean_ms": 34.0, "ttft_ms": 31.0, "gaps_ms": 3.0},
}
BATCH = {
    "id": "batch_1",
    "status": "in_progress",
    "completed_at": None,
    "expires_at": 1_700_000_000,
    "request_counts": {"total": 2, "completed": 1, "failed": 0},
    "coserve": {"paused": False, "eta": 1_700_000_100, "waiting_for": "suspect"},
}
SLO = {
    "slo": "ttft p99 <= 500ms",
    "measured_ms": 241.0,
    "online_alone_ms": 210.0,
    "added_ms": 31.0,
    "limit_ms": 500.0,
    "met": True,
}
BOTH = {
    "at": 1_700_000_000.0,
    "model": "m",
    "batches": {"path": "/v1/batches", "data": [BATCH]},
    "headroom": {"headroom_tokens_per_s": 5, "tokens_per_s": 9.5, "required_tokens_per_s": 4},
}
LATENCY = {
    "values": 5,
    "measured_ms": {"p50": 26.0, "p99": 241.0},
    "online_alone_ms": {"p50": 25.0, "p99": None},
    "ratio": {"p50": 1.04, "p99": None},
}
BESIDE = {
    "promise": "First tokens at most 500 ms (P99).",
    "latencies": dict.fromkeys(("ttft", "tpot", "tbt", "e2e"), LATENCY),
    "streams": {"slowdown": {"p50": 1.25, "p99": 1.6}},
    "cache": {"share": 0.98},
}
SERVER = BOTH | {
    "policy": "coserve",
    "sample_age_s": 0.5,
    "online_users": USERS | {"slos": [SLO]},
    "history": {"at": [1.0, 2.0], "offline_share": [None, 0.5]},
    "decisions": [{"at": 1_700_000_000.0, "steps": 3, "text": "why", "subject": "x"}],
}
ENGINE = {
    "url": "http://a:1",
    "state": "up",
    "takes_no_lines_because": None,
    "lines_in_flight": 3,
    "window": 8,
    "offline_tokens_per_s": 5.0,
    "load": {"online": {"running": 1}, "offline": {"running": 2}},
    "online_users": USERS,
}
FLEET = BOTH | {
    "online_users": USERS,
    "engines": [ENGINE],
    "fleet": {"lines_waiting": 5, "offline_tokens_per_s": 5.0},
}


@pytest.mark.parametrize("answer", [SERVER, FLEET], ids=["server", "fleet"])
def test_servers_and_fleets_are_shown(answer: dict[str, Any]) -> None:
    text = shown(answer, 200)
    for part in ("Fine.", "34 ms", "batch_1", "suspect", "1/2", "headroom 5 tokens/s"):
        assert part in text
    parts = ("ttft p99 <= 500ms", "why") if answer is SERVER else ("http://a:1", "1 of 1 engines")
    for part in parts:
        assert part in text


def test_offline_work_that_has_stopped_is_shown_with_its_error() -> None:
    text = shown(SERVER | {"offline_stopped_by": "ValueError: no plan"}, 200)
    assert "offline requests wait until the engine's next start" in text
    assert "ValueError: no plan" in text
    assert "next start" not in shown(SERVER | {"offline_stopped_by": None}, 200)


def test_what_has_ended_hides_nothing_that_goes_on() -> None:
    ended = [BATCH | {"id": f"batch_e{n}", "status": "cancelled"} for n in range(9)]
    ended[0]["coserve"] = {"paused": True, "eta": None}
    text = shown(SERVER | {"batches": {"path": "/v1/batches", "data": [*ended, BATCH]}}, 200)
    assert text.index("batch_1") < text.index("batch_e0")
    assert "paused" not in text


@pytest.mark.parametrize(
    ("reason", "text"),
    [("slot", "waits for a slot, which other lines have"), ("new", "waits for new"), (None, "")],
)
def test_what_a_batch_waits_for_is_told_in_words(reason: str | None, text: str) -> None:
    assert waiting_text({"coserve": {"waiting_for": reason}}) == text
    assert waiting_text({"coserve": {}}) == "", "a server of an earlier version"


def test_what_others_wrote_stays_text() -> None:
    coserve = {"paused": False, "eta": None}
    batch = {**BATCH, "id": "batch_1\x1b[2J", "coserve": coserve}
    hostile = view(model="\x1b]0;title\x07[red]m", batches={"path": "/v1/batches", "data": [batch]})
    text = shown(hostile, width=200)
    assert "\x1b]0;" not in text
    assert "\x1b[2J" not in text
    assert "[red]m" in text
    assert "batch_1\\x1b[2J" in text


def test_values_are_shown() -> None:
    history = {"at": [1.0, 2.0], "offline_share": [None, 0.5], "offline_tokens_per_s": [0.0, 1500]}
    known = view(**SERVER | {"history": history})
    line = as_line(known)
    assert "ttft p99 241 ms (+31 ms)" in line
    assert "delayed by 34 ms a request" in line
    assert "offline 1,500 tokens/s 50% of the time" in line


def test_the_promise_is_shown_with_latencies_beside_alone() -> None:
    known = view(**SERVER | {"online_users": SERVER["online_users"] | BESIDE})
    text, line = shown(known, 200), as_line(known)
    assert "promised: First tokens at most 500 ms (P99)." in text
    rows = [row.split() for row in text.splitlines()]
    values = ["26", "ms", "25", "ms", "1.04", "×", "241", "ms", "–", "–"]
    for name in (
        "time to first token",
        "mean gap of a request",
        "gaps between tokens",
        "end to end",
    ):
        assert [*name.split(), *values] in rows
    for each in (text, line):
        assert "streams at 80% of their speed alone (slowest 1% 62%)" in each
        assert "conversations find 98% of the cached tokens" in each


def test_a_stream_or_cache_of_which_nothing_is_known_is_not_shown() -> None:
    unknown = {"streams": {"slowdown": {"p50": None, "p99": None}}, "cache": {"share": None}}
    known = view(**SERVER | {"online_users": SERVER["online_users"] | BESIDE | unknown})
    assert "streams" not in shown(known, 200)
    assert "conversations" not in as_line(known)
