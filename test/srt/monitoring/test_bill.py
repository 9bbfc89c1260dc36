"""What a real server bills its offline work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from srt.batch_server.deployment import API_KEY
from srt.monitoring.watched import ONLINE_REQUESTS, Watched


def test_the_status_says_by_how_much_online_requests_were_delayed(watched: Watched) -> None:
    online = watched.status_afterwards["online"]
    # One more is traced.
    assert ONLINE_REQUESTS / 2 <= online["billed"] <= ONLINE_REQUESTS + 1
    assert online["delay_s"] == pytest.approx(online["delay_ttft_s"] + online["delay_gaps_s"])
    # How exact it is, the benchmark and the simulator say: a test machine has other work.
    seen_s = sum(one.ttft_s + sum(one.gaps_s) for one in watched.online)
    assert online["delay_s"] != 0
    assert online["delay_s"] < seen_s


def test_the_batch_has_all_of_it_and_the_status_names_no_batch(watched: Watched) -> None:
    delay_s = watched.batch["coserve"]["online_delay_s"]
    billed_s = watched.status_afterwards["online"]["delay_s"]
    assert delay_s == pytest.approx(max(0.0, billed_s), abs=0.002)
    assert watched.batch_id not in watched.get("/coserve/status").text


def test_coserve_status_shows_it(watched: Watched) -> None:
    command = [sys.executable, "-m", "sglang_coserve", "status", watched.batch_id]
    options = ["--base-url", f"{watched.base_url}/v1", "--api-key", API_KEY]
    shown = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    delay_s = watched.batch["coserve"]["online_delay_s"]
    assert f"delayed online requests by {delay_s:.1f} s in all" in shown.stdout + shown.stderr
