"""``coserve simulate fleet``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sglang_coserve.cli import app
from sglang_coserve.errors import ConfigError
from sglang_coserve.simulator.fleet_run import FLEET_COLUMNS

SMALL = ("simulate", "fleet", "--duration", "4", "--max-running", "16", "--quiet")


def simulated(*arguments: str) -> Result:
    result = CliRunner().invoke(app, [*SMALL, *arguments])
    assert result.exit_code == 0, result.output
    return result


def cells(result: Result) -> list[dict[str, str]]:
    label, head, _, *rows = result.output.splitlines()
    assert label == "(simulated)"
    assert all(column in head for column in FLEET_COLUMNS)
    return [
        dict(zip(FLEET_COLUMNS, map(str.strip, row.strip("| ").split("|")), strict=True))
        for row in rows
        if row.strip()
    ]


def test_a_fleet_is_compared_with_as_many_engines_alone(tmp_path: Path) -> None:
    output = tmp_path / "fleet.json"
    alone, two = cells(simulated("--engines", "2", "-o", str(output)))
    assert two["pulled"] == two["returned"] == "0"
    assert (alone["engines"], two["engines"]) == ("1, alone", "2")
    assert alone["of alone %"] == "100.0"
    assert 60 < float(two["of alone %"]) < 120
    assert float(two["busiest ÷ mean"]) < 1.5
    report = json.loads(output.read_text())
    assert report["label"] == "simulated" and report["settings"]["engines"] == [2]
    assert [result["engines"] for result in report["results"]] == [1, 2]


def test_the_same_seed_is_the_same_result() -> None:
    flags = ("--engines", "4", "--pools", "--policy", "ooco", "--slo-tpot-ms", "50", "--seed", "3")
    assert simulated(*flags).output == simulated(*flags).output


def test_a_batch_that_ends_before_the_time_is_told(tmp_path: Path) -> None:
    batch = tmp_path / "batch.jsonl"
    body = {"model": "m", "prompt": "A river", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    batch.write_text(json.dumps(line) + "\n")
    result = CliRunner().invoke(app, [*SMALL, "--engines", "2", "--offline", str(batch)])
    assert isinstance(result.exception, ConfigError)
    assert "name a longer file" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engines", "two"), "such as 2,4,8"),
        (("--engines", "0,2"), "from 1"),
        (("--engines", "2,3", "--pools"), "even numbers"),
        (("--policy", "fcfs,coserve"), "a fleet has one"),
    ],
)
def test_flags_that_cannot_be_used_are_told(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, [*SMALL, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
