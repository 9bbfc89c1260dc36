"""SGLang's bench_serving twice at once, on real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from sglang_coserve.local_server import LocalServer, free_port
from srt.documentation.blocks import ROOT, Reader, blocks_of
from started_processes import processes_of
from waiting import eventually

pytestmark = pytest.mark.heavy

TIMEOUT_S = 300
SERVER_FLAGS = ("--log-level", "warning", "--startup-profile-seconds", "1")
ONLINE = (
    *("--dataset-name", "random-ids", "--random-input-len", "32", "--random-output-len", "8"),
    *("--num-prompts", "12", "--request-rate", "6"),
)
OFFLINE = (
    *("--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", "16"),
    *("--num-prompts", "4000", "--max-concurrency", "4"),
)


def bench(out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sglang_coserve.bench_serving", "--out", str(out), *words]
    return subprocess.Popen(
        [*command, "--online", *ONLINE, "--offline", *OFFLINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def table_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("|")]


def num_offline_received(server: LocalServer) -> int:
    (replica,) = httpx2.get(f"{server.base_url}/coserve/status", timeout=30).json()["replicas"]
    return int(replica["offline"]["received"])


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Ours, with the small model."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    flags = ["--model-path", str(small_model), *SERVER_FLAGS]
    with LocalServer(flags, log_path=log_path, ready_timeout_s=TIMEOUT_S) as running:
        yield running


def test_a_server_gets_both_loads_and_one_that_is_not_there_costs_its_row(
    server: LocalServer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["--base-url", f"coserve-slo={server.base_url}"]
    words += [f"alone=http://127.0.0.1:{free_port()}", "--warmup-s", "0"]
    words += ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000"]
    process = bench(out, *words, "--repeats", "2")
    output, _ = process.communicate(timeout=1.5 * TIMEOUT_S)
    assert process.returncode == 1, output
    assert processes_of(out) == []
    results = json.loads((out / "results.json").read_text())
    assert "does not answer" in results["failed"]["alone"]
    assert "failed: alone:" in output
    assert "coserve-slo (2 of 2): both loads" in output  # Without a terminal.
    ((name, run),) = results["systems"].items()
    assert (name, run["plan"]["command"]) == ("coserve-slo", [server.base_url])
    assert "| coserve-slo |" in output

    assert "Medians of 2 repeats" in output
    first, repeat = run["repeats"]
    first_ms, again_ms = (one["figures"]["p99_ttft_ms"] for one in (first, repeat))
    assert run["figures"]["p99_ttft_ms"] == pytest.approx((first_ms + again_ms) / 2)
    assert first_ms != again_ms
    figures, reports = repeat["figures"], repeat["reports"]
    assert figures["online_failed"] == figures["offline_failed"] == 0
    online, offline = reports["online"], reports["offline"]
    assert online["bench_serving"]["completed"] == 12
    assert figures["p99_ttft_ms"] == online["bench_serving"]["p99_ttft_ms"]
    # Gaps may differ: SGLang leaves those out that several tokens had to the first text.
    ttft_ms = online["latencies"]["ttft_ms"]
    assert ttft_ms["p99"] == pytest.approx(online["bench_serving"]["p99_ttft_ms"], rel=1e-6)
    (status,) = online["coserve"]
    assert status["offline"]["received"] > 0
    # The offline load was there before and after, ended when told, and its reports agree.
    assert offline["began_s"] < online["began_s"] < online["ended_s"]
    assert online["ended_s"] <= offline["ended_s"]
    assert not figures["offline_ran_out"]
    assert offline["unsent"] + offline["bench_serving"]["completed"] == 4000
    assert online["bench_serving"]["request_rate"] == 6.0
    assert figures["offline_tokens_per_s"] > 0
    assert figures["slo_attainment"] == 1.0
    assert 0 < figures["request_goodput"] < 12
    if offline["steady_state"] is not None:
        assert offline["steady_state"]["concurrency_threshold"] == 4  # ⌈0.8 × 4⌉.


def test_the_two_lines_of_the_docs(server: LocalServer, tmp_path: Path) -> None:
    (block,) = [
        block
        for block in blocks_of(ROOT / "docs" / "compare.md")
        if "sglang.bench_serving" in block.script
    ]
    received_before = num_offline_received(server)
    # Shorter, and each into a file of its own.
    lengths = r"--random-input-len \d+ --random-output-len \d+"
    script = re.sub(lengths, "--output-file FILE", block.script)
    script = re.sub(r"--num-prompts \d+", "--num-prompts 16", script)
    script = script.replace("--output-file", " ".join(ONLINE[2:6]) + " --output-file")
    script = script.replace("FILE", "online.jsonl", 1).replace("FILE", "offline.jsonl", 1)
    Reader(server.base_url, tmp_path).follow(replace(block, text=script))
    for name in ("online", "offline"):
        (report,) = map(json.loads, (tmp_path / f"{name}.jsonl").open())
        assert report["completed"] == 16
    assert num_offline_received(server) == received_before + 16 + 1  # One to warm up.


def test_an_interrupted_comparison_leaves_no_process_behind(
    tmp_path: Path, small_model: Path
) -> None:
    out = tmp_path / "out"
    words = ["--model-path", str(small_model), "--systems", "coserve"]
    process = bench(out, *words, "--server", "--served-model-name", str(out))

    def has_started() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(out.glob("runs/*/server.log")) and len(processes_of(out)) >= 2

    # The command, and a server that starts. While the command imports, Python may end it itself.
    eventually(has_started, TIMEOUT_S)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert processes_of(out) == []
    assert "interrupted" in output


@pytest.mark.timeout(8 * TIMEOUT_S)
def test_servers_are_started_stock_is_tuned_and_what_was_measured_is_not_again(
    tmp_path: Path, small_model: Path
) -> None:
    out = tmp_path / "out"
    words = ["--model-path", str(small_model), "--warmup-s", "0", "--slo-scale", "1.5"]
    words += ["--systems", "alone", "stock-tuned", "stock --no-such-flag", "--chunk-tokens", "128"]
    words += ["--make-requests-early"]
    first = bench(out, *words)
    shown, _ = first.communicate(timeout=6 * TIMEOUT_S)
    assert first.returncode == 1, shown
    results = json.loads((out / "results.json").read_text())
    assert list(results["failed"]) == ["stock --no-such-flag"]
    assert "failed: stock --no-such-flag: the server ended with status" in shown
    assert list(results["systems"]) == ["alone", "stock-tuned"]
    assert results["attention_backend"] in ("intel_amx", "torch_native")
    tried = "\n".join(results["tried"])
    for flag in ("--enable-mixed-chunk", "--retraction-policy priority", "--schedule-policy lof"):
        assert flag in tried
    alone, tuned = results["systems"].values()
    assert tuned["plan"]["targets_ms"]["ttft"] == pytest.approx(
        1.5 * alone["figures"]["p99_ttft_ms"]
    )
    assert tuned["figures"]["offline_failed"] == 0
    written = {path: path.stat().st_mtime_ns for path in out.rglob("run.json")}
    again = bench(out, *words)
    assert table_in(again.communicate(timeout=TIMEOUT_S)[0]) == table_in(shown)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("run.json")} == written
