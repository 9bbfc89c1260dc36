"""The queue and the unfinished prefill of SGLang's scheduler, as they are moved about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_coserve.srt.steps.engine_queues import EngineQueues


def request(rid: str, *, queued_s: float = 0.0, ended: bool = False) -> Any:
    return SimpleNamespace(
        rid=rid,
        time_stats=SimpleNamespace(wait_queue_entry_time=queued_s),
        finished=lambda: ended,
        kv=SimpleNamespace(holds_kv=True),
    )


def batch(*reqs: Any) -> Any:
    return SimpleNamespace(reqs=list(reqs))


class Engine:
    """As much of SGLang's scheduler as the view writes to."""

    def __init__(self, *waiting: Any) -> None:
        self.waiting_queue = list(waiting)
        self.chunked_req: Any = None
        self.view = EngineQueues(self)

    @property
    def queue(self) -> list[str]:
        return [req.rid for req in self.waiting_queue]


def test_a_round_sees_what_it_offers_and_afterwards_the_queue_is_as_it_was() -> None:
    """In order of arrival, without what was admitted and with what has come meanwhile."""
    first, second = request("on0", queued_s=0), request("on1", queued_s=1)
    # An offline request that failed validation waits in SGLang's queue, and stays there.
    bad, late = request("bad", queued_s=2), request("late", queued_s=3)
    engine = Engine(first, second, bad)
    offered = [request(f"off{i}") for i in range(3)]
    engine.view.offer(["on1"], offered)
    assert engine.queue == ["on1", "off0", "off1", "off2"]
    assert engine.view.has_others_waiting
    engine.waiting_queue.remove(offered[1])
    with engine.view.own_queue():
        # Whether it is full is a matter of what waits there, hidden or not, and of no offers.
        assert engine.queue == ["on1", "on0", "bad"]
        engine.waiting_queue.remove(first)  # For one of a higher priority.
        engine.waiting_queue.append(late)
    assert engine.queue == ["on1", "late", "off0", "off2"]
    engine.waiting_queue.remove(second)
    for admitted in ([offered[1]], []):
        assert engine.view.withdraw() == admitted
        assert engine.queue == ["bad", "late"]


class Pipelined(Engine):
    """Two micro-batches, the first of which begins a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.view = EngineQueues(self, micro_batches=2)
        self.running_mbs = [batch(), batch()]
        self.mbs: list[Any] = [None, None]
        self.last_mbs: list[Any] = [None, None]
        self.running_batch = self.running_mbs[0]
        self.view.begin_turn()


def test_requests_of_the_other_micro_batches_are_seen_once() -> None:
    """Those that run there, and those of its last batch, which join them with its next pass."""
    engine = Pipelined()
    here, decode, prefilled, chunk, parked, ended = (
        request(name, ended=name == "ended")
        for name in ("here", "decode", "prefilled", "chunk", "parked", "ended")
    )
    engine.running_mbs[0].reqs = [here]
    engine.running_mbs[1].reqs = [decode, ended]
    engine.mbs[1] = batch(decode, prefilled, chunk, parked)
    engine.chunked_req = chunk
    engine.view.paused_requests.park(parked)
    assert engine.view.elsewhere() == [decode, prefilled]
    assert engine.view.running_requests() == [here, decode]


def test_what_any_micro_batch_keeps_is_kept() -> None:
    """A request that only one of these places has must not be taken for a lost one."""
    engine = Pipelined()
    places = ("queue", "grammar", "here", "running", "running batch", "step", "last step")
    kept = {place: request(place) for place in (*places, "last", "result", "chunk", "parked")}
    engine.waiting_queue = [kept["queue"]]
    engine.grammar_manager = SimpleNamespace(grammar_queue=[kept["grammar"]])
    engine.running_mbs = [batch(kept["here"]), batch(kept["running"])]
    engine.running_batch = batch(kept["running batch"])
    engine.mbs[1], engine.last_mbs[0] = batch(kept["step"]), batch(kept["last step"])
    engine.last_batch = batch(kept["last"])
    engine.result_queue = [(batch(kept["result"]), None)]
    engine.chunked_req = kept["chunk"]
    engine.view.paused_requests.park(kept["parked"])
    assert {req.rid for req in engine.view.kept()} == kept.keys()


def test_a_micro_batch_without_work_forgets_its_last_batch() -> None:
    """Its requests have joined the running ones, and may have been paused since."""
    engine = Pipelined()
    engine.last_mbs = [batch(request("a")), batch(request("b"))]
    engine.view.end_turn(batch())
    assert None not in engine.last_mbs
    engine.view.end_turn(None)
    assert engine.last_mbs[0] is None
    assert engine.last_mbs[1] is not None
    engine.view.begin_turn()
    engine.view.end_turn(None)
    assert engine.last_mbs == [None, None]
