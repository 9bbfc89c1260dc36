"""The parts of checkpointing that need no engine: streams, host memory, flags, recompute tax."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.kv_checkpoint import HostQuota
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import ConfigError, UnsupportedError
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.kv_checkpoint.host_space import HostSpace
from sglang_coserve.srt.kv_checkpoint.recompute import RecomputeMeter
from sglang_coserve.srt.kv_checkpoint.settings import (
    check_combination,
    server_settings,
)
from sglang_coserve.srt.kv_checkpoint.thread_streams import (
    Event,
    ThreadStream,
    current_stream,
    device_module,
)

OFFLINE, ONLINE = RequestClass.OFFLINE, RequestClass.ONLINE

# --- Streams ------------------------------------------------------------------------------


def test_a_stream_works_in_order_and_its_events_tell_how_far_it_is() -> None:
    stream, gate, done = ThreadStream(), threading.Event(), []
    before, after = Event(), Event()
    stream.submit(lambda: done.append(1))
    before.record(stream)
    stream.submit(lambda: (gate.wait(), done.append(2)))
    after.record(stream)
    before.synchronize()
    assert done == [1]
    assert not after.query()
    gate.set()
    stream.synchronize()
    assert done == [1, 2]
    assert after.query()
    assert before.elapsed_time(after) >= 0


def test_a_stream_can_wait_for_another() -> None:
    first, second, gate, done = ThreadStream(), ThreadStream(), threading.Event(), []
    first.submit(lambda: (gate.wait(), done.append("first")))
    event = Event()
    event.record(first)
    with device_module.stream(second):
        event.wait()
        current_stream().submit(lambda: done.append("second"))
    gate.set()
    second.synchronize()
    assert done == ["first", "second"]


def test_a_copy_that_fails_never_counts_as_done() -> None:
    stream, before, after = ThreadStream(), Event(), Event()

    def fail() -> None:
        raise RuntimeError("no such page")

    before.record(stream)
    stream.submit(fail)
    after.record(stream)
    stream._thread.join()
    assert before.query()
    assert not after.query()


# --- Host memory --------------------------------------------------------------------------


class Pool:
    """Slots counted, as SGLang's host pool does."""

    def __init__(self, size: int) -> None:
        self.logical_size = size
        self._free = list(range(size))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, slots: list[int]) -> None:
        self._free += slots


def test_a_class_is_refused_beyond_its_quota_and_asks_again_later() -> None:
    counts: Counter[str] = Counter()
    space = HostSpace(Pool(100), HostQuota(online_tokens=20, offline_tokens=80), counts)
    held = space.alloc(OFFLINE, 80, step=1)
    assert held is not None
    assert space.free_tokens(OFFLINE) == 0
    assert space.alloc(OFFLINE, 1, step=1) is None
    assert counts["allocation_failures"] == 1
    assert not space.may_try(OFFLINE, step=2)
    assert space.may_try(OFFLINE, step=3)
    assert space.may_try(ONLINE, step=2)
    assert space.alloc(ONLINE, 20, step=2) is not None
    space.free(OFFLINE, held)
    assert space.alloc(OFFLINE, 40, step=3) is not None
    space.assert_consistent()


def test_a_class_without_a_share_never_asks() -> None:
    space = HostSpace(Pool(10), HostQuota(online_tokens=0, offline_tokens=10), Counter())
    assert not space.may_try(ONLINE, step=1000)


# --- Flags --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kv_checkpoint", {"kv_checkpoint": "always"}),
        ("kv_checkpoint_host_gb", {"kv_checkpoint": "eager", "kv_checkpoint_host_gb": 0}),
        ("kv_checkpoint_host_gb", {"kv_checkpoint_host_gb": 4.0}),
        ("kv_checkpoint_watermark", {"kv_checkpoint_watermark": 1.5}),
        ("kv_checkpoint_offline_share", {"kv_checkpoint_offline_share": -0.1}),
        ("kv_checkpoint_online_share", {"kv_checkpoint_online_share": 0.1}),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(field: str, values: Any) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        CoserveConfig(**values)


def test_off_changes_nothing_of_sglang() -> None:
    assert server_settings(CoserveConfig(), on_cpu=True) == {}


def test_the_hooks_do_nothing_with_another_cache() -> None:
    kv = KvCheckpointing(tree_cache=object())
    row = Row("off", offline=True)
    kv.processed(batch([row], [(0, 10)]))
    kv.prefetch()
    assert kv.hold_back([row]) == set()
    kv.forget("off")
    stats = kv.stats().to_dict()
    assert stats["mode"] == "off"
    assert stats["checkpointed_tokens"] == 0
    assert stats["classes"]["offline"]["computed_tokens"] == 10


@pytest.mark.parametrize(
    "settings",
    [
        {"disable_radix_cache": True},
        {"enable_hierarchical_cache": True},
        {"radix_cache_backend": "flexkv"},
        {"cpu_offload_gb": 2},
    ],
)
def test_other_caches_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(UnsupportedError, match="--" + name.replace("_", "-")):
        check_combination(settings, CoserveConfig(kv_checkpoint="lazy"))
    check_combination(settings, CoserveConfig())


# --- The recompute tax --------------------------------------------------------------------


class Row:
    """A request as the meter reads it."""

    def __init__(self, rid: str, *, offline: bool) -> None:
        self.rid = rid
        marks = {"coserve_class": "offline"} if offline else None
        self.sampling_params = SimpleNamespace(custom_params=marks)

    def finished(self) -> bool:
        return False


def batch(reqs: list[Row], extends: list[tuple[int, int]] | None = None) -> Any:
    """A batch; ``extends`` are (cached, computed) tokens by row of a prefill."""
    return SimpleNamespace(
        reqs=reqs,
        forward_mode=SimpleNamespace(is_extend=lambda: extends is not None),
        prefix_lens=[begin for begin, _ in extends or ()],
        extend_lens=[tokens for _, tokens in extends or ()],
    )


def test_tokens_count_as_recomputed_up_to_where_the_row_had_been() -> None:
    meter, offline, online = RecomputeMeter(), Row("off", offline=True), Row("on", offline=False)
    meter.ran(batch([offline, online], [(0, 100), (40, 60)]))
    for _ in range(20):
        meter.ran(batch([offline]))
    assert meter.tax(OFFLINE) == 0
    # It resumes from its first 96 tokens: 24 of the 120 are computed again, and the next one.
    meter.ran(batch([offline], [(96, 25)]))
    assert meter.recomputed_tokens[OFFLINE] == 24
    assert meter.computed_tokens[OFFLINE] == 100 + 20 + 25
    assert meter.recomputed_tokens[ONLINE] == 0
    assert meter.computed_tokens[ONLINE] == 60
