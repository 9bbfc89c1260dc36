"""A batch as ``coserve status BATCH`` shows it."""

from __future__ import annotations

from typing import Any

from sglang_coserve.cli.batches import _details


def batch(**ours: Any) -> dict[str, Any]:
    usage = {"total_tokens": 7, "input_tokens": 3, "output_tokens": 4}
    return {
        "id": "batch_1",
        "status": "in_progress",
        "created_at": 1_700_000_000,
        "expires_at": 1_700_086_400,
        "completion_window": "24h",
        "request_counts": {"total": 3, "completed": 1, "failed": 0},
        "usage": usage,
        "errors": None,
        "coserve": ours,
    }


def test_it_says_why_a_batch_stands_still() -> None:
    text = _details(batch(waiting_for="quota", lines_in_flight=0, last_record_at=1_700_000_000))
    assert "\nwaits for room in the quota of its key" in text
    assert "\nlatest result 2023-11-1" in text
    assert "in the engine" not in text


def test_it_says_how_many_lines_run() -> None:
    text = _details(batch(waiting_for=None, lines_in_flight=2, last_record_at=None))
    assert "\n2 lines in the engine" in text
    assert "waits" not in text and "latest" not in text


def test_a_server_of_an_earlier_version_tells_none_of_it() -> None:
    assert len(_details(batch()).splitlines()) == 3
