"""When the host waits for the step that runs, on a clock that the tests set."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.srt.steps import clocks
from sglang_coserve.srt.steps.clocks import LaunchPacer
from sglang_coserve.srt.steps.engine_parts import launches_that_wait


def launches(backend: str, *, has_window: bool = False) -> Callable[[bool, bool], bool]:
    runner = SimpleNamespace(
        prefill_attention_backend_str=backend, decode_attention_backend_str=backend, model=None
    )
    worker = SimpleNamespace(model_runner=runner)
    return launches_that_wait(
        SimpleNamespace(tp_worker=worker, req_to_token_pool=None, is_hybrid_swa=has_window)
    )


def test_which_launches_wait_for_the_step_before() -> None:
    every = [(True, True), (True, False), (False, True), (False, False)]  # Prefills, graphs.
    assert [launches("flashinfer")(*each) for each in every] == [True, True, False, True]
    assert [launches("flashmla")(*each) for each in every] == [True, True, False, False]
    assert all(launches("flashinfer", has_window=True)(*each) for each in every)
    assert not any(launches("fa3", has_window=True)(*each) for each in every)


class Host:
    """A host and its device, whose steps run one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.free_s = 0.0
        monkeypatch.setattr(clocks, "time", self)
        self.pacer = LaunchPacer(launches("flashinfer"))
        self.in_flight: list[Any] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def launch(self, takes_s: float, expected_s: float, *, error: float = 0.0) -> None:
        """Plan and launch a decode step, which takes the host 2 ms."""
        self.pacer.expects(expected_s, error)
        began_s = self.now_s
        self.now_s += 0.002
        self.free_s = max(self.free_s, self.now_s) + takes_s
        self._launched(began_s, has_prefills=False, in_graph=True)

    def launch_layers(
        self, takes_s: float, expected_s: float, launch_s: float, *, has_prefills: bool
    ) -> None:
        """Plan a step in 2 ms, wait for the step before and launch layer by layer."""
        self.now_s += 0.002
        self.pacer.expects(expected_s)
        began_s = self.now_s
        self.now_s = max(self.now_s, self.free_s)
        self.free_s = self.now_s + takes_s
        self.now_s += launch_s
        self._launched(began_s, has_prefills=has_prefills, in_graph=False)

    def _launched(self, began_s: float, *, has_prefills: bool, in_graph: bool) -> None:
        end_s = self.free_s

        def synchronize() -> None:
            self.now_s = max(self.now_s, end_s)

        done = SimpleNamespace(query=lambda: self.now_s >= end_s, synchronize=synchronize)
        self.in_flight.append(SimpleNamespace(copy_done=done, can_run_cuda_graph=in_graph))
        self.pacer.launched(self.in_flight[-1], began_s, has_prefills=has_prefills)

    def process(self) -> None:
        self.pacer.ended(self.in_flight.pop(0))

    def wait(self) -> float:
        """Wait; return how long the device runs on."""
        self.pacer.wait()
        return self.free_s - self.now_s


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(monkeypatch)
    host.wait()
    host.launch(0.030, 0.030)
    return host


def test_a_step_may_end_earlier_by_the_usual_error(host: Host) -> None:
    host.wait()
    host.launch(0.050, 0.050, error=0.1)
    host.process()
    assert host.wait() == pytest.approx(0.002 + 0.005)


def test_what_was_not_planned_is_followed_at_once(host: Host) -> None:
    host.wait()
    host.launch(0.050, 0.0)
    host.process()
    assert host.wait() == pytest.approx(0.050)
    assert host.pacer.ahead_s(host.now_s) == 0.0


def test_the_rest_of_the_running_step_is_known(host: Host) -> None:
    host.wait()
    host.launch(0.050, 0.050)
    host.process()
    assert host.pacer.ahead_s(host.now_s) == pytest.approx(0.050)
    host.wait()
    assert host.pacer.ahead_s(host.now_s) == pytest.approx(0.002)
    host.process()
    assert host.pacer.ahead_s(host.now_s) == 0.0


def test_results_have_the_time_at_which_they_came(host: Host) -> None:
    host.wait()
    host.launch(0.050, 0.050)
    host.process()
    came_s = host.now_s
    host.wait()
    assert host.pacer.results_s == came_s < host.now_s


def test_waiting_for_results_before_a_launch_is_no_work_of_the_host(host: Host) -> None:
    host.process()
    host.wait()
    for _ in range(3):
        host.launch_layers(0.030, 0.030, launch_s=0.012, has_prefills=True)
        assert host.wait() == pytest.approx(0.002)
        host.process()


@pytest.mark.parametrize("has_prefills", [True, False])
def test_a_launch_that_waits_for_the_step_before_is_no_work_of_the_host(
    host: Host, has_prefills: bool
) -> None:
    """FlashInfer's plans: the time to plan would grow round by round to the whole step."""
    random = Random(0)
    left_s = []
    host.wait()
    for _ in range(60):
        takes_s = random.uniform(0.024, 0.030)
        host.launch_layers(takes_s, 0.026, launch_s=0.012, has_prefills=has_prefills)
        host.process()
        left_s.append(host.wait())
    assert max(left_s[20:]) < 0.002 + 0.006
