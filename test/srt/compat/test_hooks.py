"""The base classes that let every version of SGLang ask and tell our subclasses the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_coserve.srt.compat import v17, v23


class Scheduler:
    """SGLang's, with the names of both versions."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _can_schedule_lora_req(self, req: Any, running_loras: set[str]) -> bool:
        self.seen.append(running_loras)
        return True

    can_schedule_lora_req = _can_schedule_lora_req

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        self.seen.append(ignore_waiting)
        return True

    def process_batch_result(self, batch: Any, result: Any) -> None:
        self.seen.append(result.logits_output)

    def collect_inflight_reqs(self) -> set[str]:
        return {"in a batch"}

    def record_weight_version_change(self, new_version: str) -> None:
        self.seen.append(self.collect_inflight_reqs())


def scheduler(version: ModuleType) -> Any:
    class Ours(version.hooked_scheduler(Scheduler)):
        def adapters_in_use(self) -> set[str]:
            return {"paused"}

        def is_idle(self, of_sglang: bool, for_health_check: bool) -> bool:
            return of_sglang and for_health_check

        def may_flush(self, of_sglang: Callable[[], bool]) -> bool:
            self.seen.append("first")
            return not of_sglang()

        def all_requests(self) -> set[str]:
            return {"paused"}

    return Ours()


@pytest.mark.parametrize(
    ("version", "method"), [(v17, "_can_schedule_lora_req"), (v23, "can_schedule_lora_req")]
)
def test_adapters_of_all_requests_count(version: ModuleType, method: str) -> None:
    ours = scheduler(version)
    assert getattr(ours, method)(None, {"running"})
    assert ours.seen == [{"running", "paused"}]


@pytest.mark.parametrize("version", [v17, v23])
def test_whether_the_engine_is_idle_is_asked(version: ModuleType) -> None:
    ours = scheduler(version)
    assert not ours.is_fully_idle()
    assert ours.is_fully_idle(for_health_check=True)
    assert ours.seen == [False, False]


def test_whether_a_paused_engine_may_flush_is_asked_before_sglang() -> None:
    ours = scheduler(v23)
    assert not ours.is_fully_idle(ignore_waiting=True)
    assert ours.seen == ["first", True]


def test_all_requests_learn_of_other_weights_and_an_abort_does_not_see_them() -> None:
    ours = scheduler(v23)
    ours.record_weight_version_change("new")
    assert ours.seen == [{"in a batch", "paused"}]
    assert ours.collect_inflight_reqs() == {"in a batch"}


@pytest.mark.parametrize("given", [None, [[], torch.ones(1)]])
def test_requests_without_token_ids_get_a_tensor(given: list[Any] | None) -> None:
    """0.5.17 has a list there, of which its scheduler process dies."""
    ours, output = scheduler(v17), SimpleNamespace(next_token_token_ids_logprobs_val=given)
    result = SimpleNamespace(logits_output=output)
    ours.process_batch_result(SimpleNamespace(return_logprob=True), result)
    assert ours.seen == [output]
    assert all(map(torch.is_tensor, given or ()))
    ours.process_batch_result(SimpleNamespace(return_logprob=False), result)


def test_the_tokenizer_manager_is_told_of_sessions_and_of_the_end() -> None:
    seen: list[str] = []

    class Manager:
        async def begin_weight_update(self, obj: str, *args: Any) -> str:
            return f"begun {obj}"

        async def end_weight_update(self, obj: str, *args: Any) -> str:
            return f"ended {obj}"

        def set_server_stop_hook(self, hook: Callable[[], None]) -> None:
            hook()

    class Ours(v23.hooked_tokenizer_manager(Manager)):
        async def begin_session(self, begin: Callable[[], Any]) -> Any:
            return f"ours {await begin()}"

        end_session = begin_session

        def engine_has_ended(self) -> None:
            seen.append("engine")

    ours: Any = Ours()
    assert asyncio.run(ours.begin_weight_update("a", None)) == "ours begun a"
    assert asyncio.run(ours.end_weight_update("a")) == "ours ended a"
    ours.set_server_stop_hook(lambda: seen.append("server"))
    assert seen == ["engine", "server"]


def test_results_in_flight_are_none_without_overlap_in_0_5_17() -> None:
    assert list(v17.results_in_flight(SimpleNamespace())) == []
    queued = SimpleNamespace(result_queue=["a"])
    assert [list(version.results_in_flight(queued)) for version in (v17, v23)] == [["a"], ["a"]]
