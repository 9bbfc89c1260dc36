"""The parts of checkpointing that need no engine: streams, host memory, flags, loads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import cache_controller

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt import compat
from sglang_coserve.srt.compat import v17
from sglang_coserve.srt.kv_checkpoint.cpu import Event, ThreadStream, current_stream, device_module
from sglang_coserve.srt.kv_checkpoint.request_checkpoint import Backoff, HostSpace, slots_of_runs
from sglang_coserve.srt.kv_checkpoint.setup import BACKEND, CheckpointSetup
from sglang_coserve.srt.kv_checkpoint.store import CheckpointStore
from sglang_coserve.srt.kv_checkpoint.strategies import Eager
from srt.kv_checkpoint.bare_cache import BareEngine, new_request


def eager_engine(*, page_tokens: int) -> BareEngine:
    return BareEngine(Eager(), slots=256, host_slots=512, page_tokens=page_tokens)


# --- Streams ------------------------------------------------------------------------------


def test_a_load_waits_for_the_passes_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_controller, "device_module", device_module)
    passes, loads, gate, done = ThreadStream(), ThreadStream(), threading.Event(), []
    passes.submit(lambda: (gate.wait(), done.append("pass")))

    def load(*_: Any) -> None:
        current_stream().submit(lambda: done.append("load"))

    controller = SimpleNamespace(
        move_indices=lambda *slots: slots,
        load_stream=loads,
        load_fence_stream=passes,
        layer_num=1,
        mem_pool_host=SimpleNamespace(load_to_device_per_layer=load),
        mem_pool_device=None,
        io_backend="direct",
        ack_load_queue=[],
    )
    v17.start_load(controller, torch.arange(1), torch.arange(1), 1)
    gate.set()
    loads.synchronize()
    assert done == ["pass", "load"]


def test_a_copy_to_the_host_waits_for_the_passes_in_flight() -> None:
    engine = eager_engine(page_tokens=1)
    assert engine.admit(new_request("off", range(32), offline=True))
    passes, gate, copied = ThreadStream(), threading.Event(), Event()
    passes.submit(lambda: (gate.wait(), None)[1])
    compat.fence_copies(engine.cache.cache_controller, passes)
    engine.checkpoint()
    assert engine.cache.copies.in_flight_tokens == 32
    copied.record(engine.copy_streams[0])
    time.sleep(0.2)
    assert not copied.query()
    gate.set()
    engine.settle()
    assert engine.cache.copies.in_flight_tokens == 0


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


def test_allocation_is_refused_beyond_the_limit_and_asked_for_again_later() -> None:
    """SGLang's host pool has more than the limit."""
    counts: Counter[str] = Counter()
    space = HostSpace(eager_engine(page_tokens=1).cache.host_pool, counts)
    space.limit_tokens = 80
    held = space.alloc(80, step=1)
    assert held is not None
    assert space.free_tokens == 0
    assert space.alloc(1, step=1) is None
    assert counts["allocation_failures"] == 1
    assert not space.may_try(step=2)
    assert space.may_try(step=3)
    space.free(held)
    assert space.alloc(40, step=3) is not None
    assert space.used_tokens == 40


def test_the_wait_doubles_with_every_refusal_up_to_a_bound() -> None:
    backoff, step, waits = Backoff(most_steps=8), 0, []
    for _ in range(6):
        backoff = backoff.failed(step)
        tries = step + 1
        while not backoff.may_try(tries):
            tries += 1
        waits.append(tries - step - 1)
        step = tries
    assert waits == [1, 2, 4, 8, 8, 8]
    assert backoff.succeeded().may_try(0)


# --- Requests that give way -------------------------------------------------------------------


def evict_all(engine: BareEngine) -> Counter[str]:
    engine.evict(256)
    assert engine.allocator.available_size() == 256
    return engine.cache.counts


def test_what_a_request_with_a_namespace_of_its_own_has_saved_is_kept() -> None:
    engine = eager_engine(page_tokens=16)
    request = new_request("off", range(32), offline=True)
    request.extra_key = "adapter"
    request.cache_salt = "salt"  # It counts since SGLang 0.5.22.
    assert engine.admit(request)
    for _ in range(16):
        assert engine.decode(request)
    engine.checkpoint()
    engine.settle()
    engine.release(request)
    counts = evict_all(engine)
    assert (counts["adopted_tokens"], counts["demoted_tokens"]) == (16, 48)
    assert engine.admit(request)
    engine.assert_consistent()


def test_what_resumes_takes_the_room_of_online_prefixes_and_keeps_it() -> None:
    engine = eager_engine(page_tokens=16)
    request = new_request("off", range(32), offline=True)
    assert engine.admit(request)
    engine.checkpoint()
    engine.settle()
    for _ in range(48):  # As when a chunk of a prompt has just been computed: they are not saved.
        assert engine.decode(request)
    engine.release(request)
    engine.settle()  # Eviction waits 20 ms for what is being saved; a busy machine takes longer.
    evict_all(engine)
    online = new_request("online", range(100, 356), offline=False)
    assert engine.admit(online)
    engine.release(online, ends=True)
    engine.settle()
    assert engine.allocator.available_size() == 0
    assert engine.cache.prefetch_step(request, budget_tokens=256) == 80
    engine.settle()
    assert engine.cache.prefetch_step(request, budget_tokens=256) == 0
    assert (request.host_hit_length, compat.prefix_tokens(request)) == (0, 80)
    engine.cache.need(request)
    engine.evict(176)
    request.init_next_round_input(engine.cache)
    assert compat.prefix_tokens(request) == 80
    engine.assert_consistent()


# --- Flags --------------------------------------------------------------------------------

SETUP = CheckpointSetup()


@pytest.mark.parametrize(
    "given",
    [
        {"disable_radix_cache": True},
        {"enable_hierarchical_cache": True},
        {"radix_cache_backend": "flexkv"},
        {"cpu_offload_gb": 2},
        {"pp_size": 2},
    ],
)
def test_what_checkpoints_are_not_combined_with_is_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(UnsupportedError, match="--" + name.replace("_", "-")):
        SETUP.server_settings(given, CoserveConfig(kv_checkpoint="lazy"), on_cpu=True)
    assert SETUP.server_settings(given, CoserveConfig(), on_cpu=True) == {}


def test_an_engine_refuses_settings_that_were_made_without_ours() -> None:
    config = CoserveConfig(kv_checkpoint="eager")
    assert SETUP.server_settings({}, config, on_cpu=True)["radix_cache_backend"] == BACKEND
    with pytest.raises(UnsupportedError, match="as keywords"):
        SETUP.check(SimpleNamespace(radix_cache_backend=None), config, on_cpu=True)
    SETUP.check(SimpleNamespace(radix_cache_backend=None), CoserveConfig(), on_cpu=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_slots_are_looked_up_while_the_gpu_computes() -> None:
    """Written without a GPU: it has not run so far."""
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(4, 16)
    for _ in range(2):  # The first time takes long by itself.
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)
        computed = torch.cuda.Event()
        computed.record()
        slots = slots_of_runs(table, [(1, 2, 3), (3, 0, 1)])
        is_computing = not computed.query()
    assert is_computing
    assert slots.tolist() == [18, 19, 20, 48]


# --- Requests whose KV is loaded -----------------------------------------------------------


def test_a_request_is_admitted_in_the_pass_that_no_longer_waits_for_its_load() -> None:
    cache: Any = SimpleNamespace(
        prefetches=SimpleNamespace(in_flight_tokens=16, is_stuck=False),
        begin_pass=lambda _now_s: None,
        prefetch_step=lambda _req, _budget_tokens: 0,
        need=lambda _req: None,
        token_to_kv_pool_allocator=SimpleNamespace(size=1024),
    )
    req = SimpleNamespace(rid="a", host_hit_length=64, init_next_round_input=lambda _cache: None)
    store = CheckpointStore(cache)
    store.begin_pass(1.0)
    assert store.loaded(req)
    assert store.wants(req)
    store.begin_pass(10.9)
    assert not store.loaded(req)
    store.begin_pass(11.0)
    assert store.loaded(req)
    assert not store.wants(req)
