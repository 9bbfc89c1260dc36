"""What the demo says of what it measured: also where it is not in our favour."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sglang_coserve.demo.offline_load import write_offline_load
from sglang_coserve.demo.picture import draw
from sglang_coserve.demo.report import (
    DemoResult,
    OfflineResult,
    SystemResult,
    as_json,
    as_table,
    sentence,
)
from sglang_coserve.errors import InputFileError
from sglang_coserve.metrics import Outcome, RequestTimeline, SloTargets


def system(
    name: str,
    ttft_s: float,
    gap_s: float,
    tokens_per_s: float | None,
    *,
    is_complete: bool = False,
    unfinished: int = 0,
) -> SystemResult:
    """Twenty requests of ten tokens, all the same."""
    online = [
        RequestTimeline(
            rid=f"r{number}",
            arrival_s=float(number),
            token_times_s=tuple(number + ttft_s + gap_s * i for i in range(10)),
            prompt_tokens=10,
            outcome=Outcome.UNFINISHED if number < unfinished else Outcome.FINISHED,
        )
        for number in range(20)
    ]
    offline = None
    if tokens_per_s is not None:
        tokens = int(20 * tokens_per_s)
        offline = OfflineResult(30, 1, tokens, 0, 20.0, is_complete, [(10.0, tokens)])
    return SystemResult(name, f"the {name}", online, offline)


def result(ours: SystemResult, stock: SystemResult) -> DemoResult:
    return DemoResult((system("online_alone", 0.1, 0.01, None), stock, ours), SloTargets())


@pytest.mark.parametrize(
    ("ours", "stock", "parts"),
    [
        (
            system("coserve", 0.11, 0.011, 900),
            system("stock", 0.5, 0.02, 1000),
            ["1.1 × and P99 ITL 1.1 ×", "5.0 × and 2.0 ×", "were less hurt", "got as much"],
        ),
        (
            system("coserve", 0.8, 0.01, 400),
            system("stock", 0.2, 0.01, 1000),
            ["were more hurt", "got 40% of that (400 and 1,000 tokens/s)"],
        ),
        (
            system("coserve", 0.2, 0.01, 3000),
            system("stock", 0.2, 0.01, 1000, is_complete=True),
            ["hurt alike", "3.0 × as much", "the offline lines of the stock ended before"],
        ),
        (
            system("coserve", 0.2, 0.01, 100, unfinished=5),
            system("stock", 0.2, 0.01, 100),
            ["did not finish, of 20: 5 with the coserve", "too busy"],
        ),
    ],
)
def test_one_sentence_says_what_was_seen(
    ours: SystemResult, stock: SystemResult, parts: list[str]
) -> None:
    text = sentence(result(ours, stock))
    for part in parts:
        assert part in text


def test_latencies_are_set_against_those_alone() -> None:
    found = result(system("coserve", 0.11, 0.011, 900), system("stock", 0.5, 0.02, 1000))
    out = StringIO()
    Console(width=120, file=out).print(as_table(found))
    text = out.getvalue()
    assert "500 (5.0×)" in text
    assert "110 (1.1×)" in text
    assert "30 ok, 1 failed" in text
    assert as_json(found)["offline"]["tokens_per_s"] == 900


def test_the_picture_is_drawn_also_of_one_system(tmp_path: Path) -> None:
    ours = system("coserve", 0.11, 0.011, 900)
    for number, found in enumerate(
        (result(ours, system("stock", 0.5, 0.02, 1000)), DemoResult((ours,), SloTargets(0.5, 0.1)))
    ):
        draw(found, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_lines_are_repeated_until_they_last(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "Who?"}]}
    bodies = [{"prompt": "The old mill"}, chat, {"input": [1, 2]}]
    fields = {"method": "POST", "url": "/v1/completions"}
    texts = [json.dumps({"custom_id": f"l{i}", **fields, "body": b}) for i, b in enumerate(bodies)]
    source.write_text("\n".join([*texts, "no JSON"]) + "\n\n")
    assert write_offline_load(source, target, 0.02, {"priority": 0}) == 10
    lines = target.read_text().splitlines()
    assert len(lines) == 10
    assert lines[3] == lines[7] == "no JSON"
    first, again = json.loads(lines[0]), json.loads(lines[4])
    assert first["body"] == {"prompt": "The old mill", "priority": 0}
    assert again["custom_id"] == "l0-1"
    assert again["body"]["prompt"] == "Copy 1. The old mill"
    assert json.loads(lines[5])["body"]["messages"][0]["content"] == "Copy 1. Who?"
    assert write_offline_load(source, target, 0.001, {}) == 4  # Never less than the file.
    assert target.read_text().splitlines()[0] == texts[0]


def test_a_file_without_requests_is_told(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    with pytest.raises(InputFileError, match="cannot be read"):
        write_offline_load(empty, tmp_path / "out", 1.0, {})
    empty.write_text("\n")
    with pytest.raises(InputFileError, match="no request"):
        write_offline_load(empty, tmp_path / "out", 1.0, {})
