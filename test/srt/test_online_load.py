"""SGLang's own figures without what offline requests hold: each pool, replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats

from sglang_coserve.http_lines.engine_load import ClassLoad, ReplicaLoad
from sglang_coserve.srt.monitoring.online_load import (
    CoserveLoadSnapshot,
    OnlineLoad,
    count_offline_in_snapshots,
    read_our_snapshots,
)
from sglang_coserve.srt.monitoring.replica_load import HeldKv
from sglang_coserve.srt.steps.kv_pools import KvByClass

POOLS = PoolStats(
    full_num_used=800,
    full_token_usage=0.8,
    full_available_size=150,
    full_evictable_size=50,
    is_hybrid_swa=True,
    swa_num_used=300,
    swa_token_usage=0.75,
    swa_available_size=100,
    swa_evictable_size=0,
    is_hybrid_ssm=True,
    mamba_num_used=10,
    mamba_usage=0.5,
    mamba_available_size=10,
    mamba_evictable_size=0,
)


def request(rid: str, *, is_offline: bool) -> Any:
    params = {"coserve_class": "offline"} if is_offline else None
    return SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(custom_params=params),
        priority=None,
    )


REQUESTS = [
    request("on", is_offline=False),
    *(request(f"off-{n}", is_offline=True) for n in range(4)),
]


def online_load(requests: list[Any]) -> OnlineLoad:
    scheduler: Any = SimpleNamespace(
        pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: POOLS),
        running_batch=SimpleNamespace(reqs=requests),
        waiting_queue=[request("waits", is_offline=False)],
        chunked_req=requests[-1],
        enable_priority_scheduling=False,
    )
    pools: Any = SimpleNamespace(held_in_window=lambda reqs: 60 * len(reqs))
    online = [request for request in requests if request.rid == "on"]
    offline = [request for request in requests if request.rid != "on"]
    held = HeldKv(online, offline, KvByClass(online=200, offline=600, cached=50, free=150))
    load: Any = SimpleNamespace(held=lambda: held)
    parts: Any = SimpleNamespace(scheduler=scheduler, pools=pools, advisory=None)
    return OnlineLoad(parts, load)


def test_what_offline_requests_hold_of_any_pool_is_evictable() -> None:
    load = online_load(REQUESTS)
    pools = load.get_pool_stats()
    assert (pools.full_num_used, pools.full_evictable_size) == (200, 650)
    assert pools.full_token_usage == pytest.approx(0.2)
    assert (pools.swa_num_used, pools.swa_evictable_size) == (60, 240)
    assert pools.swa_token_usage == pytest.approx(0.15)
    assert (pools.mamba_num_used, pools.mamba_evictable_size) == (2, 8)
    assert pools.mamba_usage == pytest.approx(0.1)
    assert load.running_batch().reqs == REQUESTS[:1]
    assert load.chunked_req() is None


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes of one; decoders that are replaced are put back."""
    monkeypatch.setattr(load_snapshot, "snapshot_decoder", load_snapshot.snapshot_decoder)
    load = ReplicaLoad(
        online=ClassLoad(running=1, waiting=0, outstanding_tokens=40),
        offline=ClassLoad(running=4, waiting=9, outstanding_tokens=5000),
        kv_tokens=1000,
        online_kv_tokens=200,
        reclaimable_kv_tokens=650,
        reclaim_s=0.0,
        headroom_tokens_per_s=1.5,
        max_lines=2,
    )
    told = CoserveLoadSnapshot(num_running_reqs=1, num_total_tokens=200, coserve=load.model_dump())
    return msgspec.msgpack.encode(told)


def test_who_does_not_know_of_ours_reads_past_it(snapshot: bytes) -> None:
    stock = msgspec.msgpack.Decoder(load_snapshot.LoadSnapshot).decode(snapshot)
    assert stock.num_running_reqs == 1
    read_our_snapshots()
    ours = load_snapshot.snapshot_decoder.decode(snapshot)
    assert ReplicaLoad(**ours.coserve).offline.waiting == 9
    assert ours.to_dict() == stock.to_dict()


def test_the_controller_of_replicas_counts_offline_requests(snapshot: bytes) -> None:
    """Else all lines of a batch would go to the replica with the fewest online requests."""
    count_offline_in_snapshots()
    both = load_snapshot.snapshot_decoder.decode(snapshot)
    assert (both.num_running_reqs, both.num_waiting_reqs, both.num_total_tokens) == (5, 9, 5200)
