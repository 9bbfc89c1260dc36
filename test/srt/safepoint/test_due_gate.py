"""A pass stops when its time is up, by the clock and not by a prediction."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from sglang_coserve.srt.safepoint import gates
from sglang_coserve.srt.safepoint.gates import LeaderGate, PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted

LAYERS, GROUP_S = 8, 0.01


class Pass:
    """A pass in which each group of layers takes 10 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outstanding_groups: int = 1) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(gates, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        self.flag = PreemptionFlag()
        passed = SimpleNamespace(record=lambda: None, query=lambda: True)
        self.gate = LeaderGate(self.flag, [passed] * outstanding_groups)

    def run(self, until_s: float, first: int = 0) -> int | None:
        """Return the layer before which it stops."""
        self.gate.arm(1, until_s)
        try:
            for layer in range(first, LAYERS):
                self.gate.reached(layer)
                self.now_s += GROUP_S
        except ForwardPreempted as stop:
            return stop.layer
        finally:
            self.gate.disarm()
            self.flag.lower()
        return None


@pytest.mark.parametrize(("outstanding_groups", "layer"), [(1, 3), (2, 2)])
def test_a_group_that_would_end_too_late_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, outstanding_groups: int, layer: int
) -> None:
    """On a GPU the one before it still has to be computed, too."""
    subject = Pass(monkeypatch, outstanding_groups)
    assert subject.run(until_s=100.035) == layer


def test_the_first_group_runs_also_if_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that never got on would be suspended for ever."""
    subject = Pass(monkeypatch)
    assert subject.run(until_s=99.0) == 1
    assert subject.run(until_s=99.0, first=1) == 2


def test_an_arrival_stops_it_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Pass(monkeypatch)
    subject.flag.raise_for(1)
    assert subject.run(until_s=math.inf) == 0
