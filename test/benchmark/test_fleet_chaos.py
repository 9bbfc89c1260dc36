"""The fleet's chaos run, for some seconds: the long one is ``benchmark/fleet_chaos.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fleet_chaos
from chaos_bench.router import router_command

SMG = router_command("smg")
KINDS = ("kill -9 of an engine", "kill -9 of the gateway")
ZERO = (
    *("engines that did not end or start as they should", "lines lost", "lines doubled"),
    *("lines different", "lines given up"),
)
ZERO_ONLINE = ("that failed otherwise", "online answers different")


@pytest.mark.heavy
def test_nothing_is_lost_doubled_or_different(small_model: Path, tmp_path: Path) -> None:
    """Two real engines behind a router, one of them and the gateway of other versions; the one
    that is killed is not waited for.
    """
    router = ("--router", str(SMG), "--online-rate", "2") if SMG else ()
    flags = (
        *("--engines", "2"),
        *("--minutes", "0", "--pause", "1", "2", "--injuries", *KINDS),
        *("--known", "8", "--lines", "30", "--unfinished", "2", "--out", str(tmp_path)),
        *("--model-path", str(small_model), "--server-flag=--dtype", "--server-flag=float32"),
        *("--server-flag=--startup-profile-seconds", "--server-flag=0", *router),
    )
    found = fleet_chaos.run(fleet_chaos.parse_options(flags))
    figures = {figure.name: figure.value for figure in found}
    zero = (*ZERO, *(ZERO_ONLINE if SMG else ()))
    assert {name: figures[name] for name in zero} == dict.fromkeys(zero, 0)
    assert [figures[kind] for kind in KINDS] == [1, 1]
    assert figures["lines"] >= 30
    assert (tmp_path / "table.md").exists()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["command"] and "commit" in results["machine"]
