"""The view as text: what is unknown, and what others wrote."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from sglang_coserve.view.terminal import as_line, as_screen


def view(**changes: Any) -> dict[str, Any]:
    """What a server says that has just started."""
    return {
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
    } | changes


def shown(of: dict[str, Any], width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(as_screen(of))
    return out.getvalue()


def test_a_server_that_has_just_started_is_shown() -> None:
    assert "unknown" in as_line(view())
    assert "\n" not in as_line(view())
    text = shown(view())
    assert "has not said anything yet" in text
    assert "--coserve-data-dir" in text


def test_what_others_wrote_stays_text() -> None:
    batch = {
        "id": "batch_1\x1b[2J",
        "status": "in_progress",
        "completed_at": None,
        "expires_at": 1_700_000_000,
        "request_counts": {"total": 2, "completed": 1, "failed": 0},
        "coserve": {"paused": False, "eta": None, "eta_p95": None},
    }
    hostile = view(model="\x1b]0;title\x07[red]m", batches={"path": "/v1/batches", "data": [batch]})
    text = shown(hostile, width=200)
    assert "\x1b]0;" not in text
    assert "\x1b[2J" not in text
    assert "[red]m" in text
    assert "batch_1\\x1b[2J" in text


def test_an_engine_that_is_silent_is_told() -> None:
    silent = view(sample_age_s=90.0)
    assert "the engine does not answer" in as_line(silent)
    assert "90 s ago" in shown(silent)


def test_values_and_curves_are_shown() -> None:
    slo = {
        "slo": "ttft p99 <= 500ms",
        "measured_ms": 241.0,
        "online_alone_ms": 210.0,
        "added_ms": 31.0,
        "limit_ms": 500.0,
        "met": True,
        "feasible": True,
    }
    bill = {"requests": 5.0, "mean_ms": 34.0, "ttft_ms": 31.0, "gaps_ms": 3.0}
    users = {"level": "ok", "text": "Fine.", "requests": 5, "slos": [slo], "bill": bill}
    history = {"at": [1.0, 2.0], "offline_share": [None, 0.5], "offline_tokens_per_s": [0.0, 1500]}
    known = view(online_users=users, history=history)
    line = as_line(known)
    assert "ttft p99 241 ms (+31 ms)" in line
    assert "delayed by 34 ms a request" in line
    assert "offline 1,500 tokens/s 50% of the time" in line
    text = shown(known)
    assert "+31 ms" in text
    assert "▁█" in text
