"""The table of predicted and measured step times that is made of a server's recorded plans."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from core.scheduler.scenarios import MODEL, NO_CACHE, offline, online, ran, snapshot
from gpu import step_times
from gpu.step_times import StepTime, read_step_times, reduce_folder, summarize_steps
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.step import StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.metrics import SloTargets
from sglang_coserve.recording.calls import RecordedStep, RecordingScheduler, SchedulerSetup
from sglang_coserve.recording.file import encode_setup, encode_step

SETUP = SchedulerSetup(
    "conserve",
    deadlines(SloTargets(1.0, 0.1)),
    SchedulerConfig(refine=False),
    LatencyProfile(MODEL, None, "h100", "llama-3.1-8b", 1, "0.5.17"),
)
DECODES = StepStats.of(decodes=[100, 200])


def record(path: Path) -> None:
    """A decode step as predicted, a prefill step 25% longer, and a step without a plan."""
    steps: list[RecordedStep] = []
    scheduler = RecordingScheduler(SETUP.make(), steps.append)
    decodes = snapshot(online(100, RequestState.DECODING, generated=3), offline(200), now_s=5.0)
    ran(scheduler, scheduler.plan(decodes, NO_CACHE), decodes)
    waiting = online(64)
    prompt = snapshot(waiting, now_s=6.5)
    scheduler.arrived(waiting.info)
    scheduler.plan(prompt, NO_CACHE)  # Not started: the next plan has the same number.
    plan = scheduler.plan(prompt, NO_CACHE)
    ran(scheduler, plan, prompt, seconds=1.25 * plan.predicted_s)
    scheduler.update(StepResult(None, started_s=7.0, seconds=0.25, batch=DECODES))
    path.write_bytes(b"".join([encode_setup(SETUP), *map(encode_step, steps)]))


def test_a_recording_becomes_one_row_for_each_step(tmp_path: Path) -> None:
    recording = tmp_path / "default.jsonl"
    record(recording)
    # The server was killed while it wrote.
    with recording.open("ab") as file:
        file.write(b'{"calls": [')
    decode, prefill, unplanned = read_step_times(recording.open("rb"), "default.jsonl")
    assert (decode.kind, prefill.kind, unplanned.kind) == ("decode", "prefill", "decode")
    assert (decode.began_s, prefill.began_s, unplanned.began_s) == (0.0, 1.5, 2.0)
    assert decode.error == pytest.approx(0.0, abs=1e-3)
    assert prefill.error == pytest.approx(1 / 1.25 - 1, rel=1e-2)
    assert prefill.prefill_tokens == 64 and prefill.decode_requests == 0
    assert prefill.online_requests == 1 and prefill.as_planned
    assert (unplanned.lane, unplanned.predicted_ms, unplanned.error) == ("", None, None)
    assert (unplanned.measured_ms, unplanned.decode_context_tokens) == (250.0, 302)


def test_a_folder_of_recordings_becomes_small_tables(tmp_path: Path) -> None:
    recordings, tables = tmp_path / "plans", tmp_path / "tables"
    recordings.mkdir()
    assert reduce_folder(recordings, tables) == {} and not tables.exists()
    record(recordings / "default.jsonl")
    (recordings / "broken.jsonl").write_text('{"format": "other"}\n')
    found = reduce_folder(recordings, tables)
    assert "format" in found["broken"]["problem"]
    assert [path.name for path in recordings.iterdir()] == ["broken.jsonl"]
    with gzip.open(tables / "default.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert (rows[2]["predicted_ms"], rows[2]["measured_ms"]) == ("", "250.0")
    assert rows[0]["as_planned"] == "1"
    assert found["default"]["decode"]["steps"] == 2
    assert "| default | prefill | 1 |" in (tables / "summary.md").read_text()


STEP = StepTime(
    *(0.0, "shared", "mixed", 9.0, 10.0, None, 5.0, 0.0, 4, False, True, 0),
    *DECODES.with_prefill(64, 0),
)


def test_predictions_are_judged_for_the_batch_that_ran() -> None:
    late, other = replace(STEP, measured_ms=18.0), replace(STEP, as_planned=False)
    suspended = replace(STEP, suspensions=1)
    decode = replace(STEP, kind="decode", measured_ms=None)
    found = summarize_steps([STEP, late, other, suspended, decode])
    assert list(found) == ["mixed"]
    mixed = found["mixed"]
    assert (mixed["steps"], mixed["judged"], mixed["time_share"]) == (4, 2, 1.0)
    assert mixed["mape"] == pytest.approx((0.1 + 0.5) / 2)
    assert mixed["bias"] == pytest.approx(-(0.1 + 0.5) / 2)
    assert mixed["mean_prefill_tokens"] == 64


def test_the_program_reduces_and_says_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, out = tmp_path / "default.jsonl", tmp_path / "out"
    record(recording)
    assert step_times.main([str(recording), "--out", str(out)]) == 0
    assert "| default | decode |" in capsys.readouterr().out
    assert recording.exists() and (out / "default.csv.gz").exists()
    assert step_times.main([str(tmp_path / "none.jsonl"), "--out", str(out)]) == 2
    assert "none.jsonl: cannot be read" in capsys.readouterr().err
