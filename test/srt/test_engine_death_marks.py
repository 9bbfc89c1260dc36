"""What a process leaves that dies of a signal, and what tells a death from a stop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_coserve.srt.process_health import is_stop_asked
from sglang_coserve.srt.tokenizer.tokenizer_manager import WeightUpdates

DYING = """
import faulthandler, os, signal, sys
from pathlib import Path
from sglang_coserve.srt.process_health import fatal_signals_recorded_in

with fatal_signals_recorded_in(Path(sys.argv[1])):
    if sys.argv[2] == "SIGSEGV":
        faulthandler._sigsegv()
    os.kill(os.getpid(), signal.Signals[sys.argv[2]])
"""


@pytest.mark.parametrize(
    ("name", "is_fault"), [("SIGSEGV", True), ("SIGABRT", True), ("SIGKILL", False)]
)
def test_a_fault_leaves_a_trace_and_a_kill_leaves_none(
    tmp_path: Path, name: str, is_fault: bool
) -> None:
    path = tmp_path / "trace"
    child = subprocess.run([sys.executable, "-c", DYING, str(path), name], timeout=60)
    assert child.returncode == -signal.Signals[name]
    assert ("Fatal Python error" in path.read_text()) == is_fault


def test_a_stop_is_known_from_both_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        """As uvicorn's."""

        should_exit = False

        def handle_exit(self, *_: object) -> None:
            self.should_exit = True

    server, manager = Server(), SimpleNamespace(gracefully_exit=False)
    assert not is_stop_asked(manager)
    before = signal.signal(signal.SIGINT, server.handle_exit)
    try:
        assert not is_stop_asked(manager)
        signal.raise_signal(signal.SIGINT)
        assert is_stop_asked(manager)
    finally:
        signal.signal(signal.SIGINT, before)
    manager.gracefully_exit = True
    assert is_stop_asked(manager)


async def test_weights_have_another_name_after_every_exchange_and_in_every_process() -> None:
    weights, others = WeightUpdates(), WeightUpdates()
    assert weights.name == others.name == ""
    told: list[bool] = []
    weights.listeners.add(lambda: told.append(weights.is_changing))
    names = []
    for _ in range(3):
        with weights.updating():
            assert weights.is_changing
        assert weights.cache_key == weights.name
        weights.emptied_cache()
        assert weights.cache_key == ""
        names.append(weights.name)
    with pytest.raises(RuntimeError), weights.updating():
        raise RuntimeError("it failed")
    with others.updating():
        pass
    assert len({*names, weights.name, others.name}) == 5
    assert told == [True] * 4
    assert weights.cache_key == weights.name
    assert others.cache_key == others.name
    # Paused lines stay where they are, and none begins before generation goes on.
    weights.pause()
    with weights.updating():
        pass
    assert told == [True] * 4
    waiting = asyncio.create_task(weights.settled())
    await asyncio.sleep(0)
    assert not waiting.done()
    weights.resume()
    await asyncio.wait_for(waiting, 5)


def test_weights_change_from_the_beginning_of_a_session_to_its_end() -> None:
    weights, told = WeightUpdates(), []
    weights.listeners.add(lambda: told.append(True))
    weights.open_session()
    assert told == [True]
    with weights.updating():
        pass
    weights.emptied_cache()
    weights.pause()
    weights.resume()
    assert weights.is_changing
    before = weights.name
    weights.close_session()
    assert not weights.is_changing
    # Weights may have changed after the last update, under requests that left KV in the cache.
    assert weights.cache_key == weights.name != before


def test_what_fails_when_weights_are_exchanged_keeps_neither_them_nor_others() -> None:
    weights, told = WeightUpdates(), []

    def fail() -> None:
        raise RuntimeError("out of luck")

    weights.listeners.add(fail)
    weights.listeners.add(lambda: told.append(True))
    with weights.updating():
        assert told == [True]
    assert not weights.is_changing


def test_paused_lines_leave_when_generation_goes_on_within_a_session() -> None:
    weights = WeightUpdates()
    told: list[bool] = []
    weights.listeners.add(lambda: told.append(weights.is_changing))
    weights.pause()
    weights.open_session()
    assert told == []
    weights.resume()
    assert told == [True]
    weights.close_session()
    assert not weights.is_changing
