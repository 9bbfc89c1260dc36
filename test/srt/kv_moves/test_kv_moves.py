"""Requests leave an engine and go on after a flush of all its KV, with what they left in a file."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_coserve.srt.kv_moves.file_moves import FileMoves
from sglang_coserve.srt.kv_moves.kv_directory import KvDirectory, KvFileError
from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.kv_checkpoint.consistency import assert_consistent
from srt.safepoint.random_suspensions import suspensions_of
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec

MODEL = "some model"
NUM_TOKENS, TOKENS_BEFORE = 90, 40
LINES: list[Spec] = [
    # Two with the same head, one whose prompt takes several chunks.
    (f"{1:032x}", scenarios.prompt(60, 70), NUM_TOKENS, True),
    (f"{2:032x}", scenarios.prompt(60, 48) + scenarios.prompt(61, 21), NUM_TOKENS, True),
    (f"{3:032x}", scenarios.prompt(62, 200), NUM_TOKENS, True),
]
RIDS = [spec[0] for spec in LINES]
LENGTHS = {spec[0]: len(spec[1]) for spec in LINES}

KINDS = [
    pytest.param(("eager", True, 16), id="eager-overlap-page16"),
    pytest.param(("lazy", False, 1), id="lazy-normal-page1"),
    pytest.param(("eager", True, 1), id="eager-overlap-page1", marks=pytest.mark.heavy),
    pytest.param(("lazy", True, 16), id="lazy-overlap-page16", marks=pytest.mark.heavy),
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
def engine(kind: Any, start_checkpointing: Any, directory: Path) -> EngineProcess:
    return started(start_checkpointing, directory, *kind)


def started(start: Any, directory: Path, mode: str, overlap: bool, page_size: int) -> EngineProcess:
    coserve = {"kv_move_dir": str(directory)}
    return start(mode, overlap=overlap, page_size=page_size, coserve=coserve)


# --- What happens in the engine ----------------------------------------------------------


def left_tokens(engine: ScriptedEngine) -> dict[str, int]:
    """Check that all lines have left; return of how many tokens of each the KV was left."""
    ended = {rid: engine.reqs[rid].finished_reason.to_json() for rid in RIDS}
    assert {end["type"] for end in ended.values()} == {"abort"}
    assert_consistent(engine.scheduler.tree_cache)
    engine.assert_nothing_leaked()
    return {rid: int(end["message"].rpartition(" ")[2]) for rid, end in ended.items()}


def leave(engine: ScriptedEngine) -> dict[str, Any]:
    """Let all lines leave once each has some tokens; return what they have, and what they left."""
    moves, has_asked = engine.scheduler.parts.moves, []

    def script(iteration: int) -> list[Any]:
        if has_asked:
            raise StopIteration
        if iteration == 0:
            return [engine.request(*spec) for spec in LINES]
        if all(len(engine.output(rid)) >= TOKENS_BEFORE for rid in RIDS):
            has_asked.append(moves.ask([*RIDS, "f" * 32], MODEL))
            assert has_asked == [RIDS], "one is not known"
        return []

    engine.run(script)
    return {"tokens": left_tokens(engine), "outputs": engine.outputs(LINES)}


def served(engine: ScriptedEngine, requests: list[Any], tokens_before: int) -> dict[str, Any]:
    """Serve lines that come, with so many output tokens; return the outputs, and what was
    prefilled and what not."""
    before = engine.kv_figures()
    engine.run(requests)
    after = engine.kv_figures()
    computed = [stats["recompute"]["offline"]["computed_tokens"] for stats in (before, after)]
    outputs = engine.outputs(LINES)
    # The first token after those that were left is one of the prefill.
    decoded = sum(map(len, outputs.values())) - tokens_before - len(RIDS)
    assert_consistent(engine.scheduler.tree_cache)
    engine.assert_nothing_leaked()
    return {
        "outputs": outputs,
        "prefilled": computed[1] - computed[0] - decoded,
        "moved_in": after["moved_in_tokens"] - before["moved_in_tokens"],
        "without": after["moves_without_kv"] - before["moves_without_kv"],
    }


def go_on(engine: ScriptedEngine, left: dict[str, Any], model: str = MODEL) -> dict[str, Any]:
    """Let the lines come back; return their outputs, and how much was prefilled."""
    requests = []
    for spec in LINES:
        request = engine.request(*spec)
        generated, tokens = left["outputs"][spec[0]], left["tokens"][spec[0]]
        request.sampling_params.custom_params |= {
            "_coserve_generated": generated,
            "_coserve_moved_kv": (spec[0], tokens, model),
        }
        requests.append(request)
    return served(engine, requests, sum(map(len, left["outputs"].values())))


def suspended(engine: ScriptedEngine, scenario: Callable[..., Any], *args: Any) -> Any:
    stops = suspensions_of(engine)
    with stops.stopping(seed=1, probability=0.5):
        return scenario(engine, *args)


# --- All goes well -----------------------------------------------------------------------


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_lines_go_on_elsewhere_with_their_kv(
    engine: EngineProcess, kind: Any, directory: Path, reference_outputs: Reference
) -> None:
    page = kind[2]
    left = engine.call(leave)
    found = files(directory)
    assert [path.name for path in found] == [f"{rid}-0.kv.safetensors" for rid in RIDS]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    for rid, tokens in left["tokens"].items():
        assert len(left["outputs"][rid]) >= TOKENS_BEFORE
        total = LENGTHS[rid] + len(left["outputs"][rid]) - 1
        assert tokens == total // page * page
    came = engine.call(go_on, left)
    assert came["outputs"] == reference_outputs(LINES)
    # Under overlap scheduling each is in one more batch after its end.
    assert came["prefilled"] <= (page + kind[1]) * len(LINES)
    assert came["moved_in"] == sum(left["tokens"].values())
    assert came["without"] == 0
    assert not files(directory), "who takes a file removes it"


# --- What can fail -----------------------------------------------------------------------


@pytest.fixture
def one(start_checkpointing: Any, directory: Path) -> EngineProcess:
    """The engine of the first kind, for what does not depend on the kind."""
    return started(start_checkpointing, directory, "eager", overlap=True, page_size=16)


def leave_and_go_on(engine: ScriptedEngine, directory: Path, damage: str, model: str) -> Any:
    left, paths = leave(engine), files(directory)
    contents = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        if damage == "missing":
            path.unlink()
        elif damage == "of another line":
            path.write_bytes(contents[number - 1])
    return go_on(engine, left, model)


@pytest.mark.parametrize(
    ("damage", "model"),
    [("missing", MODEL), ("of another line", MODEL), ("none", "another model")],
)
def test_a_file_that_is_not_what_was_written_means_recomputation(
    one: EngineProcess, directory: Path, reference_outputs: Reference, damage: str, model: str
) -> None:
    came = one.call(leave_and_go_on, directory, damage, model)
    assert came["outputs"] == reference_outputs(LINES)
    assert came["moved_in"] == 0
    assert came["without"] == len(LINES)
    assert came["prefilled"] > 2 * 16 * len(LINES)
    assert not files(directory), "what was tried is removed"


def leave_with_bad_disk(engine: ScriptedEngine, hangs: bool) -> Any:
    """Neither writing nor reading comes to an end, or both fail; the engine goes on."""
    moves, gate = engine.scheduler.parts.moves, threading.Event()
    moves.timeout_s, directory = 0.3, moves._files._directory

    def fail(*_args: Any) -> Any:
        if hangs:
            gate.wait()
        raise OSError(28, "No space left on device")

    directory.write = fail
    left = leave(engine)
    assert set(left["tokens"].values()) == {0}
    directory.take = fail
    left["tokens"] = dict.fromkeys(RIDS, 32)
    came = go_on(engine, left)
    gate.set()
    del directory.write, directory.take
    moves.timeout_s = FileMoves.timeout_s
    return came


@pytest.mark.parametrize("hangs", [True, False], ids=["hung", "full"])
def test_a_bad_disk_means_recomputation(
    one: EngineProcess, directory: Path, reference_outputs: Reference, hangs: bool
) -> None:
    came = one.call(leave_with_bad_disk, hangs)
    assert came["outputs"] == reference_outputs(LINES)
    assert came["moved_in"] == 0
    assert not files(directory)


def abort_on_the_way(engine: ScriptedEngine) -> Any:
    """All lines are aborted, once while they leave and once while they come."""
    moves = engine.scheduler.parts.moves
    directory, gate, seen = moves._files._directory, threading.Event(), []
    write, take = directory.write, directory.take

    def late(function: Any) -> Any:
        def call(*args: Any) -> Any:
            gate.wait()
            return function(*args)

        return call

    directory.write, directory.take = late(write), late(take)

    def script(iteration: int) -> list[Any]:
        if seen:
            raise StopIteration
        if iteration == 0:
            return [engine.request(*spec) for spec in LINES]
        if len(moves):
            seen.append(len(moves))
            return [engine.abort(rid) for rid in RIDS]
        if all(len(engine.output(rid)) >= 5 for rid in RIDS):
            moves.ask(RIDS, MODEL)
        return []

    engine.run(script)
    engine.assert_nothing_leaked()
    request = engine.request(*LINES[0])
    request.sampling_params.custom_params["_coserve_moved_kv"] = (RIDS[0], 16, MODEL)
    engine.run({0: [request], 1: [engine.abort(RIDS[0])]})
    engine.assert_nothing_leaked()
    gate.set()
    del directory.write, directory.take
    return seen


def test_a_line_that_is_aborted_on_its_way_leaves_nothing_behind(one: EngineProcess) -> None:
    assert one.call(abort_on_the_way) == [len(LINES)]


def test_lines_of_a_suspended_step_leave(
    start_checkpointing: Any, directory: Path, reference_outputs: Reference
) -> None:
    engine = start_checkpointing(
        "eager",
        overlap=False,
        page_size=16,
        coserve={"kv_move_dir": str(directory), "safepoint_interval": 1},
    )
    left = engine.call(suspended, leave)
    came = engine.call(suspended, go_on, left)
    assert came["outputs"] == reference_outputs(LINES)
    assert came["moved_in"] == sum(left["tokens"].values()) > 0


def test_a_file_that_is_given_up_while_it_gets_its_name_is_not_left(tmp_path: Path) -> None:
    """The one who gives it up may have looked for it just before."""
    directory, name = KvDirectory(tmp_path, rank=0), RIDS[0]
    answers = iter([True, False])

    def is_wanted() -> bool:
        wanted = next(answers)
        if wanted:
            directory.remove(name)  # What the other one does between this and the rename.
        return wanted

    directory.write(name, "identity", torch.zeros(8, dtype=torch.uint8), is_wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:],
        lambda content: b"\xff" * len(content),
        lambda content: content + bytes(1 << 20),
    ],
    ids=["cut short", "a bit flipped", "no header", "much larger"],
)
def test_a_damaged_file_is_refused_and_removed(tmp_path: Path, damage: Any) -> None:
    directory, kv = KvDirectory(tmp_path, rank=0), torch.zeros(4096, dtype=torch.uint8)
    directory.write(RIDS[0], "identity", kv, lambda: True)
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(KvFileError) as refused:
        directory.take(RIDS[0], "identity", len(kv))
    assert len(str(refused.value)) < len(str(path)) + 100, "the log has what is in the file"
    assert not files(tmp_path)
