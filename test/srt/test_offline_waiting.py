"""The order of waiting offline requests against a plain list."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_coserve.srt.admission.unplanned import OfflineWaiting


def test_in_a_pipeline_the_cool_down_lasts_as_many_passes_as_results_take() -> None:
    waiting = OfflineWaiting(2)
    new, first, second = (SimpleNamespace(rid=rid) for rid in ("new", "first", "second"))
    waiting.reqs["new"] = new
    for req in (first, second):
        waiting.start_pass()
        waiting.put_back(req)
    assert list(waiting.reqs) == ["new"]
    assert list(waiting) == [second, first, new]
    waiting.start_pass()
    assert list(waiting.reqs) == ["first", "new"]
    waiting.start_pass()
    assert list(waiting.reqs) == ["second", "first", "new"]


class WaitingMachine(RuleBasedStateMachine):
    """Ready and cooling requests, modelled as two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = OfflineWaiting()
        self.ready: list[str] = []
        self.cooling: list[str] = []
        self.running: list[str] = []
        self.count = 0

    @rule()
    def append(self) -> None:
        self.count += 1
        self.waiting.reqs[str(self.count)] = SimpleNamespace(rid=str(self.count))
        self.ready.append(str(self.count))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.ready))
        self.waiting.reqs.pop(rid)
        self.ready.remove(rid)
        self.running.append(rid)

    @precondition(lambda self: self.running)
    @rule()
    def put_back(self) -> None:
        rid = self.running.pop()
        self.waiting.put_back(SimpleNamespace(rid=rid))
        self.cooling.insert(0, rid)

    @rule()
    def start_pass(self) -> None:
        self.waiting.start_pass()
        self.ready = self.cooling + self.ready
        self.cooling = []

    @rule(residue=st.integers(0, 3))
    def remove(self, residue: int) -> None:
        removed = self.waiting.remove(lambda req: int(req.rid) % 4 == residue)
        gone = [rid for rid in self.cooling + self.ready if int(rid) % 4 == residue]
        assert [req.rid for req in removed] == gone
        self.ready = [rid for rid in self.ready if rid not in gone]
        self.cooling = [rid for rid in self.cooling if rid not in gone]

    @invariant()
    def same_order(self) -> None:
        assert [req.rid for req in self.waiting] == self.cooling + self.ready
        assert len(self.waiting) == len(self.cooling) + len(self.ready)
        assert list(self.waiting.reqs) == self.ready


TestOfflineWaiting = WaitingMachine.TestCase
TestOfflineWaiting.settings = settings(deadline=None)
