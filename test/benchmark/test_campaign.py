"""Campaigns: which runs are missing, and how their figures are stored."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from common.results import recorded_command, settings_of
from common.schedulers import usual_settings
from emulated_bench.campaign import Campaign, Run, run_missing
from emulated_bench.cases import CHAT_OFFLINE
from emulated_bench.contenders import (
    ALONE,
    CHUNK_TOKENS,
    DEFAULT,
    GROUPS,
    PLAIN,
    contenders,
    pairs,
)
from emulated_bench.simulation import simulated_row
from emulated_bench.stored import StoredLoad
from interference_bench.systems import EngineSystem
from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.srt.start_defaults import ANYWHERE

BENCHMARK = Path(__file__).parents[2] / "benchmark"
OF_ALONE = SloTargets(0.3, 0.02)
ROW = {
    "online": 10,
    "attained": dict.fromkeys(pairs(SloTargets()), 1.0),
    "ttft_p50_ms": 100.0,
    "ttft_p99_ms": 200.0,
    "itl_p50_ms": 10.0,
    "itl_p99_ms": 30.0,
    "tpot_p50_ms": 10.0,
    "tpot_p99_ms": 20.0,
    "e2e_p50_ms": 1000.0,
    "online_from_cache": 0.0,
    "offline_tokens_per_s": 5000.0,
}


def options(folder: Path, **values: Any) -> Namespace:
    """Return a command line of one load and our default."""
    usual = {
        "traffic": ["azure-code-like"],
        "load": [0.5],
        "repeats": 1,
        "seconds": 4.0,
        "offline": [512, 32],
        "in_flight": 20,
        "model": "llama-3.1-8b",
        "hardware": "h100",
        "tp": 1,
        "traces": folder / "traces",
        "requests": 1,
        "at_once": 100,
        "chats": 4,
        "systems": ["default"],
        "forget": [],
        "chunks": [*CHUNK_TOKENS],
        "out": folder / "out",
    }
    return Namespace(**{**usual, **values})


def opened(folder: Path, **values: Any) -> Campaign:
    return Campaign.of(options(folder, **values), kind="simulated")


def same_figures(_run: Run, _of_alone: SloTargets) -> dict[str, Any]:
    return ROW


def names(runs: list[Run]) -> list[tuple[str, int]]:
    return [(run.contender.name, run.repeat) for run in runs]


def test_runs_are_stored_at_once_and_not_made_again(tmp_path: Path) -> None:
    campaign = opened(tmp_path)
    runs = campaign.missing()
    assert names(runs) == [(PLAIN, 0), (DEFAULT, 0)]

    def interrupted(run: Run, of_alone: SloTargets) -> dict[str, Any]:
        if not run.is_alone:
            raise KeyboardInterrupt
        return ROW

    with pytest.raises(KeyboardInterrupt):
        run_missing(campaign, runs, interrupted)
    again = opened(tmp_path, repeats=2, systems=["default", "pace"])
    runs = again.missing()
    assert (PLAIN, 0) not in names(runs)
    assert {(PLAIN, 1), (DEFAULT, 0), ("ours, gaps of 25 ms", 1)} <= set(names(runs))
    assert run_missing(again, runs, same_figures) == []
    assert opened(tmp_path, repeats=2, systems=["default", "pace"]).missing() == []


def test_targets_are_those_of_the_same_requests_alone(tmp_path: Path) -> None:
    campaign = opened(tmp_path)
    given = []

    def figures(run: Run, of_alone: SloTargets) -> dict[str, Any]:
        given.append(of_alone)
        return ROW

    run_missing(campaign, campaign.missing(), figures)
    assert given[1] == SloTargets(pytest.approx(0.24), pytest.approx(0.024))


def test_a_failed_run_is_told_left_out_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = opened(tmp_path, repeats=2)

    def figures(run: Run, of_alone: SloTargets) -> dict[str, Any]:
        if (run.contender.name, run.repeat) == (PLAIN, 1):
            raise SystemExit("no answer in 3600 s")
        return ROW

    failed = run_missing(campaign, campaign.missing(), figures)
    assert failed == [
        "azure-code-like, 50%: plain SGLang alone, seed 1",
        "azure-code-like, 50%: ours, default, seed 1",  # It needs the former one's figures.
    ]
    assert campaign.end(failed) == 1
    assert "no answer in 3600 s" in capsys.readouterr().err
    assert names(opened(tmp_path, repeats=2).missing()) == [(PLAIN, 1), (DEFAULT, 1)]


def test_a_group_can_be_forgotten(tmp_path: Path) -> None:
    campaign = opened(tmp_path)
    run_missing(campaign, campaign.missing(), same_figures)
    assert names(opened(tmp_path, forget=["default"]).missing()) == [(DEFAULT, 0)]
    assert names(opened(tmp_path, forget=["alone"]).missing()) == [(PLAIN, 0), (DEFAULT, 0)]


def test_a_folder_holds_figures_of_one_setting(tmp_path: Path) -> None:
    campaign = opened(tmp_path)
    run_missing(campaign, campaign.missing(), same_figures)
    with pytest.raises(ConfigError, match="another in_flight"):
        opened(tmp_path, in_flight=30)
    with pytest.raises(ConfigError, match=r"azure-code-like-load-50\.json .* another .*seconds"):
        opened(tmp_path, requests=1000)


def test_chats_have_their_own_rate_and_offline_work(tmp_path: Path) -> None:
    campaign = opened(tmp_path, traffic=["chat"], load=[0.2, 0.8])
    assert [case.offline for case in campaign.cases] == [*CHAT_OFFLINE]
    assert {case.rate_per_s for case in campaign.cases} == {4 / 45}
    assert campaign.cases[0].name == "chat, offline 4,096 + 128"
    assert campaign.loads[0].path.name == "chat-offline-4096x128.json"


def test_traffic_without_its_trace_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = opened(tmp_path, traffic=["azure-conversation", "azure-code-like"])
    assert [case.traffic_name for case in campaign.cases] == ["azure-code-like"]
    assert "left out: azure-conversation needs" in capsys.readouterr().err


def test_every_system_of_ours_has_settings_that_the_server_takes() -> None:
    found = contenders(GROUPS, CHUNK_TOKENS)
    assert len({one.group for one in found.values()}) == len(GROUPS) + 1
    for one in found.values():
        engine = one.engine(OF_ALONE)
        if engine.coserve is not None:
            assert CoserveConfig(**engine.coserve).objective().slos
    assert found["ours, 500 and 30 ms"].engine(OF_ALONE).coserve == {
        "offline_policy": "coserve",
        "slo": ("ttft p99 <= 500.000ms", "tpot p99 <= 30.000ms"),
    }
    of_alone = found["ours, 1.2 × alone"].engine(OF_ALONE).coserve
    assert of_alone is not None
    assert of_alone["slo"] == ("ttft p99 <= 300.000ms", "tpot p99 <= 20.000ms")
    assert found[DEFAULT].engine(OF_ALONE) == EngineSystem(coserve={"offline_policy": "coserve"})
    assert found[PLAIN].engine(OF_ALONE) == EngineSystem(has_offline=False)
    assert found["stock, mixed chunks of 256"].engine(OF_ALONE).flags["enable_mixed_chunk"]


def test_engines_start_as_servers_do() -> None:
    """Prefixes of online requests are evicted last by ours, and by no stock SGLang."""
    ours, stock = (usual_settings(is_ours=is_ours, on_cpu=True) for is_ours in (True, False))
    assert ours.keys() - stock.keys() == ANYWHERE.keys()
    assert "radix_eviction_policy" in ours


def test_groups_are_run_one_by_one() -> None:
    assert list(contenders(["default"], CHUNK_TOKENS)) == [PLAIN, DEFAULT]
    stock = list(contenders(["stock"], [512, 1024]))
    assert stock[:3] == [PLAIN, "stock, mixed chunks of 512", "stock, mixed chunks of 1,024"]


def test_results_do_not_tell_the_folders_of_a_machine(tmp_path: Path) -> None:
    words = ["python", "/home/me/bench.py", "--traces", "/data/traces", "--out", "results/8b"]
    assert recorded_command(words) == "python bench.py --traces traces --out results/8b"
    given = Namespace(traces=tmp_path / "traces", model=Path("models/8b"), seconds=1.0)
    assert settings_of(given) == {"traces": "traces", "model": "models/8b", "seconds": 1.0}


def test_a_stored_load_of_other_requests_is_not_added_to(tmp_path: Path) -> None:
    load = StoredLoad.opened(tmp_path / "a.json", {"rate_per_s": 1.0})
    load.add({"system": PLAIN, "repeat": 0, **ROW}, Namespace())
    assert StoredLoad.opened(tmp_path / "a.json", {"rate_per_s": 1.0}).has(PLAIN, 0)
    with pytest.raises(ConfigError, match="another rate_per_s"):
        StoredLoad.opened(tmp_path / "a.json", {"rate_per_s": 2.0})


@pytest.mark.parametrize("name", [DEFAULT, "ours, gaps of 25 ms", "stock, mixed chunks of 512"])
def test_simulated_runs_have_all_figures(name: str, tmp_path: Path) -> None:
    case = opened(tmp_path, traffic=["chat"], seconds=100.0).cases[0]
    emulation = Emulation.of("llama-3.1-8b", "h100")
    alone = simulated_row(emulation, case, ALONE, 0, SloTargets())
    system = contenders(GROUPS, CHUNK_TOKENS)[name]
    found = simulated_row(emulation, case, system, 0, OF_ALONE)
    assert ROW.keys() <= found.keys()
    assert found["online"] == alone["online"] == len(case.requests(0))
    assert found["unfinished"] == 0
    assert alone["offline_tokens_per_s"] == 0 < found["offline_tokens_per_s"]
    assert alone["online_from_cache"] > 0.4  # Second turns find the first.


def test_the_simulated_campaign_is_made_once_and_reported(tmp_path: Path) -> None:
    folder, picture = tmp_path / "out", tmp_path / "frontier.svg"
    command = [sys.executable, str(BENCHMARK / "frontier.py"), "--out", str(folder)]
    command += ["--traffic", "azure-code-like", "--load", "0.5", "--seconds", "3", "--repeats", "1"]
    command += ["--requests", "3", "--at-once", "100", "--systems", "default", "--jobs", "1"]
    command += ["--picture", str(picture), "--pictured", "azure-code-like, 50%"]
    for missing in (2, 0):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{missing} runs of 1 loads are missing" in done.stderr
        assert "simulated: llama-3.1-8b on h100" in done.stdout
    stored = json.loads((folder / "azure-code-like-load-50.json").read_text())
    assert [row["system"] for row in stored["rows"]] == [PLAIN, DEFAULT]
    assert "simulated: no GPU was measured" in picture.read_text()


@pytest.mark.heavy
def test_the_emulated_campaign_runs_ours_and_stock(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK / "bench_emulated.py"), "--out", str(tmp_path)]
    command += ["--traffic", "azure-code-like", "--load", "0.5", "--seconds", "3", "--repeats", "1"]
    command += ["--requests", "3", "--at-once", "100", "--systems", "default", "stock"]
    command += ["--chunks", "512", "--in-flight", "20", "--offline", "512", "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "azure-code-like-load-50.json").read_text())
    for row in stored["rows"]:
        assert ROW.keys() <= row.keys()
        assert row["unfinished"] == 0
    assert stored["rows"][0]["bound_tokens_per_s"] > 0
    assert "emulated: llama-3.1-8b on h100" in done.stdout
