"""Requests leave an engine and go on after a flush of all its KV, with what they left in a file."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.srt.kv_checkpoint.kv_directory import KvDirectory
from sglang_coserve.srt.kv_checkpoint.kv_moves import KvMoves
from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.kv_checkpoint.checkpoint_engine import CheckpointEngine
from srt.safepoint.random_suspensions import suspensions_of
from srt.scripted_engine import ScriptedEngine, Spec

MODEL = "some model"
NUM_TOKENS, TOKENS_BEFORE = 90, 40
LINES: list[Spec] = [
    # Two with the same head, one whose prompt takes several chunks.
    (f"{1:032x}", scenarios.prompt(60, 70), NUM_TOKENS, True),
    (f"{2:032x}", scenarios.prompt(60, 48) + scenarios.prompt(61, 21), NUM_TOKENS, True),
    (f"{3:032x}", scenarios.prompt(62, 200), NUM_TOKENS, True),
]
RIDS = [spec[0] for spec in LINES]

KINDS = [
    pytest.param(("eager", True, 16, "coserve"), id="eager-overlap-page16"),
    pytest.param(("lazy", False, 1, "coserve"), id="lazy-normal-page1"),
    pytest.param(("pressure", False, 16, "fifo"), id="fifo-pressure-normal-page16"),
    pytest.param(("eager", True, 1, "coserve"), id="eager-overlap-page1", marks=pytest.mark.heavy),
    pytest.param(("lazy", True, 16, "coserve"), id="lazy-overlap-page16", marks=pytest.mark.heavy),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moved") / "kv"
    KvDirectory.check(path)
    return path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def engine(kind: Any, start_checkpointing: Any, directory: Path) -> CheckpointEngine:
    mode, overlap, page_size, policy = kind
    return started(start_checkpointing, directory, mode, overlap, page_size, policy)


def started(
    start: Any, directory: Path, mode: str, overlap: bool, page_size: int, policy: str = "coserve"
) -> CheckpointEngine:
    coserve: dict[str, Any] = {"kv_move_dir": str(directory), "offline_policy": policy}
    if policy == "fifo":
        coserve |= {"startup_profile_seconds": 10.0, "safepoint_interval": None}
    process = start(mode, overlap=overlap, page_size=page_size, coserve=coserve)
    assert isinstance(process, CheckpointEngine)
    return process


# --- What happens in the engine ----------------------------------------------------------


def leave(engine: ScriptedEngine, tokens_before: int = TOKENS_BEFORE) -> dict[str, Any]:
    """Let all lines leave once each has some tokens; return what they have, and what they left."""
    moves, has_asked = engine.scheduler.parts.moves, []

    def script(iteration: int) -> list[Any]:
        if has_asked:
            raise StopIteration
        if iteration == 0:
            return [engine.request(*spec[:3], offline=True) for spec in LINES]
        if all(len(engine.output(rid)) >= tokens_before for rid in RIDS):
            has_asked.append(moves.ask([*RIDS, "f" * 32], MODEL))
            assert has_asked == [RIDS], "one is not known"
        return []

    engine.run(script)
    ended = {rid: engine.reqs[rid].finished_reason.to_json() for rid in RIDS}
    assert {end["type"] for end in ended.values()} == {"abort"}
    tokens = {rid: int(end["message"].rpartition(" ")[2]) for rid, end in ended.items()}
    outputs = {rid: engine.output(rid) for rid in RIDS}
    engine.scheduler.tree_cache.assert_consistent()
    engine.assert_nothing_leaked()
    return {"tokens": tokens, "outputs": outputs}


def go_on(engine: ScriptedEngine, left: dict[str, Any], model: str = MODEL) -> dict[str, Any]:
    """Let the lines come back; return their outputs, and what the first prefill of each was."""
    requests = []
    for spec in LINES:
        request = engine.request(*spec[:3], offline=True)
        generated, tokens = left["outputs"][spec[0]], left["tokens"][spec[0]]
        request.sampling_params.custom_params |= {
            "_coserve_generated": generated,
            "_coserve_moved_kv": (spec[0], tokens, model),
        }
        requests.append(request)
    before = engine.scheduler.parts.checkpointing.stats()
    iterations = engine.run(requests)
    after = engine.scheduler.parts.checkpointing.stats()
    computed: dict[str, int] = {}
    for iteration in iterations:
        # The first prefill of each: in later ones it may be a decode beside others.
        if iteration.is_extend:
            found = zip(iteration.rids, iteration.extend_lens, strict=True)
            computed = dict(found) | computed
    outputs = {rid: engine.output(rid) for rid in RIDS}
    engine.scheduler.tree_cache.assert_consistent()
    engine.assert_nothing_leaked()
    return {
        "outputs": outputs,
        "computed": computed,
        "moved_in": after.moved_in_tokens - before.moved_in_tokens,
        "without": after.moves_without_kv - before.moves_without_kv,
    }


def suspended(engine: ScriptedEngine, scenario: Callable[..., Any], *args: Any) -> Any:
    stops = suspensions_of(engine)
    stops.start(seed=1, probability=0.5)
    try:
        return scenario(engine, *args)
    finally:
        stops.stop()


def with_moves(engine: ScriptedEngine, **attributes: Any) -> KvMoves:
    moves = engine.scheduler.parts.moves._kv
    for name, value in attributes.items():
        setattr(moves, name, value)
    return moves


# --- All goes well -----------------------------------------------------------------------


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def lengths() -> dict[str, int]:
    return {spec[0]: len(spec[1]) for spec in LINES}


def test_lines_go_on_elsewhere_with_their_kv(
    engine: CheckpointEngine, kind: Any, directory: Path, reference_outputs: Reference
) -> None:
    page = kind[2]
    left = engine.call(leave)
    found = files(directory)
    assert [path.name for path in found] == [f"{rid}-0.kv.safetensors" for rid in RIDS]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    for rid, tokens in left["tokens"].items():
        assert len(left["outputs"][rid]) >= TOKENS_BEFORE
        total = lengths()[rid] + len(left["outputs"][rid]) - 1
        assert tokens == total // page * page
    came = engine.call(go_on, left)
    assert came["outputs"] == reference_outputs(LINES)
    assert max(came["computed"].values()) <= page
    assert came["moved_in"] == sum(left["tokens"].values())
    assert came["without"] == 0
    assert not files(directory), "who takes a file removes it"
