"""The queue and the unfinished prefill of SGLang's scheduler, as they are moved about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_coserve.srt.marks.request_marks import CLASS_KEY
from sglang_coserve.srt.steps.engine_view import EngineView


def req(rid: str, *, offline: bool = False, fails: bool = False, queued_s: float = 0.0) -> Any:
    params = {CLASS_KEY: "offline"} if offline else None
    return SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(custom_params=params),
        to_finish="an error" if fails else None,
        time_stats=SimpleNamespace(wait_queue_entry_time=queued_s),
    )


class Engine:
    """As much of SGLang's scheduler as the view writes to."""

    def __init__(self, *waiting: Any) -> None:
        self.waiting_queue = list(waiting)
        self.running_batch: Any = SimpleNamespace(reqs=[], batch_is_full=True)
        self.last_batch: Any = None
        self.chunked_req: Any = None
        self.grammar_manager: Any = None
        self.result_queue: list[Any] = []
        self._pending_chunked_abort_req: Any = None
        self.chunked_prefill_size = 512
        self.is_mixed_chunk = True
        self.retracted: list[str] = []
        self.view = EngineView(self)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        assert is_retracted
        self.retracted.append(req.rid)

    @property
    def queue(self) -> list[str]:
        return [req.rid for req in self.waiting_queue]


def test_what_was_offered_and_not_admitted_is_taken_back() -> None:
    # An offline request that failed validation waits in SGLang's queue, and stays there.
    engine = Engine(req("on"), req("bad", offline=True, fails=True))
    offered = [req(f"off{i}", offline=True) for i in range(3)]
    engine.view.offer(offered)
    assert engine.queue == ["on", "bad", "off0", "off1", "off2"]
    engine.waiting_queue.remove(offered[1])  # Admitted.
    assert engine.view.withdraw() == ([offered[0], offered[2]], 1)
    assert engine.queue == ["on", "bad"]
    assert engine.view.withdraw() == ([], 0)


def test_a_request_that_comes_during_a_pass_goes_before_the_offered_ones() -> None:
    engine, late = Engine(req("on")), req("late")
    engine.view.offer([req("off0", offline=True), req("off1", offline=True)])
    with engine.view.own_queue():
        engine.waiting_queue.append(late)
    assert engine.queue == ["on", "late", "off0", "off1"]


def test_whether_the_queue_is_full_is_a_matter_of_what_waits_there() -> None:
    """Not of what is offered, and also of what is hidden for the round; a victim leaves it."""
    first, second, late = req("on0", queued_s=0), req("on1", queued_s=1), req("late", queued_s=2)
    engine = Engine(first, second)
    offline = [req(f"off{i}", offline=True) for i in range(3)]
    engine.view.offer_only([second, *offline], offline)
    engine.waiting_queue.remove(offline[1])  # Admitted.
    with engine.view.own_queue():
        assert sorted(engine.queue) == ["on0", "on1"]
        engine.waiting_queue.remove(first)  # For one of a higher priority.
        engine.waiting_queue.append(late)
    assert engine.queue == ["on1", "late", "off0", "off2"]
    assert engine.view.withdraw() == ([offline[0], offline[2]], 1)
    engine.view.show_again()
    assert engine.queue == ["on1", "late"]


def test_a_hidden_request_comes_back_in_order_of_arrival() -> None:
    first, second, third = (req(f"on{i}", queued_s=i) for i in range(3))
    engine = Engine(first, second, third)
    offline = req("off", offline=True)
    engine.view.offer_only([third, offline], [offline])
    assert engine.queue == ["on2", "off"]
    assert engine.view.withdraw() == ([offline], 0)
    engine.view.show_again()
    assert engine.queue == ["on0", "on1", "on2"]


class Pipelined(Engine):
    """Two micro-batches, the first of which begins a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.view = EngineView(self, micro_batches=2)
        self.running_mbs = [batch(), batch()]
        self.mbs: list[Any] = [None, None]
        self.last_mbs: list[Any] = [None, None]
        self.running_batch = self.running_mbs[0]
        self.view.begin_turn()


def batch(*reqs: Any) -> Any:
    return SimpleNamespace(reqs=list(reqs), batch_is_full=False)


def request(rid: str, *, ended: bool = False) -> Any:
    made = req(rid, offline=True)
    made.finished = lambda: ended
    made.kv = SimpleNamespace(holds_kv=True)
    return made


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
