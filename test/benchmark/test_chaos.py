"""The chaos run, for a minute: the long one is ``benchmark/chaos.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

import chaos
from common.figures import Figure

ZERO = (
    *("ends of the server that nobody asked for", "lines lost", "lines doubled"),
    *("lines different", "online answers different", "answers of 5xx"),
    "probes without an answer",
)


@pytest.mark.parametrize("injuries", [("kill -9", "kill -9 of the scheduler", "full disk")])
def test_nothing_is_lost_doubled_or_different(
    injuries: tuple[str, ...], small_model: Path, tmp_path: Path
) -> None:
    flags = (
        *("--minutes", "0.3", "--pause", "2", "6", "--model-path", str(small_model)),
        *("--known", "12", "--lines", "20", "--unfinished", "2", "--streams", "1"),
        *("--storms", "1", "--out", str(tmp_path), "--in-turn", "--injuries", *injuries),
        *("--server-flag=--dtype", "--server-flag=float32"),
        *("--server-flag=--startup-profile-seconds", "--server-flag=0"),
        # Loose targets: what is asked here is whether lines are lost, not what they may cost.
        *("--server-flag=--slo-ttft-ms", "--server-flag=2000"),
        *("--server-flag=--slo-tpot-ms", "--server-flag=500"),
    )
    found = chaos.run(chaos.parse_options(flags))
    figures: dict[str, Figure] = {figure.name: figure for figure in found.figures}
    assert {name: figures[name].values[0] for name in ZERO} == dict.fromkeys(ZERO, 0), (
        found.examples
    )
    assert figures["injuries"].values[0] >= len(injuries)
    assert figures["online streams"].values[0] > 0
    assert figures["hostile requests"].values[0] > 0
