"""Ranks that share words stop at the same safepoint, and never wait for ever."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.srt.safepoint.gates import FollowerGate, LeaderGate, SharedWords
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted

LAYERS, BATCHES, TIMEOUT_S = 8, 100, 60.0


def shared_words(path: str, followers: int = 0) -> SharedWords:
    with Path(path).open("r+b") as file:
        return SharedWords(file.fileno(), followers, timeout_s=TIMEOUT_S)


def run_batches(path: str, rank: int, barrier: Any, results: Any) -> None:
    """Run batches of layers; a barrier after each layer stands for its collective."""
    words = shared_words(path, followers=1)
    arrived, rng = list[Any](), random.Random(rank)
    gate = (
        LeaderGate(lambda: arrived, publish=words.publish)
        if rank == 0
        else FollowerGate(words, timeout_s=TIMEOUT_S)
    )
    stops: list[tuple[int, int]] = []
    for batch in range(1, BATCHES + 1):
        arrived.clear()
        gate.arm(batch)
        try:
            for layer in range(LAYERS):
                if rank == 0 and rng.random() < 0.15:
                    arrived.append("one")
                if rng.random() < 0.02:
                    time.sleep(0.001)
                gate.reached(layer)
                barrier.wait(TIMEOUT_S)
        except ForwardPreempted as preempted:
            stops.append((batch, preempted.layer))
        finally:
            gate.disarm()
        barrier.wait(TIMEOUT_S)
    results.put((rank, stops))


@pytest.fixture
def words_path() -> Any:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4096)
        yield file.name


def test_ranks_stop_at_the_same_layers(words_path: str) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    ranks = [
        context.Process(target=run_batches, args=(words_path, rank, barrier, results), daemon=True)
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    try:
        stops = dict(results.get(timeout=2 * TIMEOUT_S) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert stops[0] == stops[1]
    assert len(stops[0]) > 50
    assert {layer for _, layer in stops[0]} == set(range(LAYERS))


def test_a_leader_that_does_not_come_ends_the_follower(words_path: str) -> None:
    gate = FollowerGate(shared_words(words_path), timeout_s=0.05)
    gate.arm(3)
    with pytest.raises(RuntimeError, match="layer 5 of batch 3"):
        gate.reached(5)


def test_the_stop_of_an_earlier_batch_stops_no_later_one(words_path: str) -> None:
    words, arrived = shared_words(words_path), list[Any](["one"])
    leader = LeaderGate(lambda: arrived, publish=words.publish)
    follower = FollowerGate(words, timeout_s=0.05)
    for gate in (leader, follower):
        gate.arm(3)
    for gate in (leader, follower):
        with pytest.raises(ForwardPreempted):
            gate.reached(2)
    arrived.clear()
    for gate in (leader, follower):
        gate.arm(4)
        gate.reached(0)
        gate.reached(2)


def test_a_rank_that_lags_by_whole_passes_finds_every_stop(words_path: str) -> None:
    """Passes that stop at once have no collective, which alone would hold rank 0 back."""
    words, one = shared_words(words_path, followers=3), list[Any](["one"])
    leader = LeaderGate(lambda: one, publish=words.publish)
    passes = [(3, 4), (5, 0), (8, 0), (9, 4)]
    begun: list[int] = []

    def lead() -> None:
        for batch, layer in passes:
            begun.append(batch)
            leader.arm(batch)
            with suppress(ForwardPreempted):
                leader.reached(layer)

    leading = threading.Thread(target=lead, daemon=True)
    leading.start()
    prompt = [FollowerGate(words, rank, timeout_s=TIMEOUT_S) for rank in (1, 2)]
    late = FollowerGate(words, 3, timeout_s=TIMEOUT_S)
    for gate in prompt:
        gate.arm(3)
        with pytest.raises(ForwardPreempted):
            gate.reached(4)
    leading.join(0.3)
    assert begun == [3]
    for batch, layer in passes:
        late.arm(batch)
        with pytest.raises(ForwardPreempted):
            late.reached(layer)
        for gate in prompt if batch > 3 else ():
            gate.arm(batch)
            with pytest.raises(ForwardPreempted):
                gate.reached(layer)
    leading.join(TIMEOUT_S)
    assert not leading.is_alive()


def test_a_follower_that_does_not_come_ends_the_leader(words_path: str) -> None:
    with Path(words_path).open("r+b") as file:
        words, one = SharedWords(file.fileno(), 1, timeout_s=0.05), list[Any](["one"])
    leader = LeaderGate(lambda: one, publish=words.publish)
    leader.arm(3)
    with pytest.raises(RuntimeError, match="rank 1 did not reach layer 5 of batch 3"):
        leader.reached(5)
