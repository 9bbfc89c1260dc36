"""Loads of replicas together, as a gateway reads them."""

from __future__ import annotations

import pytest

from sglang_coserve.errors import InputFileError
from sglang_coserve.http_lines.engine_load import (
    ClassLoad,
    ReplicaLoad,
    WantedLines,
    total,
)
from sglang_coserve.json_documents import read_json

BUSY = ReplicaLoad(
    online=ClassLoad(running=2, waiting=1, outstanding_tokens=300),
    offline=ClassLoad(running=8, waiting=20, outstanding_tokens=9000),
    kv_tokens=4096,
    online_kv_tokens=600,
    reclaimable_kv_tokens=3000,
    reclaim_s=0.02,
    headroom_tokens_per_s=500.0,
    max_lines=6,
)
IDLE = ReplicaLoad(
    online=ClassLoad(running=0, waiting=0, outstanding_tokens=0),
    offline=ClassLoad(running=0, waiting=0, outstanding_tokens=0),
    kv_tokens=4096,
    online_kv_tokens=0,
    reclaimable_kv_tokens=100,
    reclaim_s=0.0,
    headroom_tokens_per_s=2000.0,
    max_lines=8,
)


def test_replicas_add_up_and_the_slowest_says_how_long() -> None:
    both = total([BUSY, IDLE])
    assert both.online == BUSY.online
    assert both.offline == BUSY.offline
    assert (both.kv_tokens, both.online_kv_tokens, both.reclaimable_kv_tokens) == (8192, 600, 3100)
    assert (both.reclaim_s, both.headroom_tokens_per_s, both.max_lines) == (0.02, 2500.0, 14)
    assert total([BUSY]) == BUSY


def test_a_load_is_read_as_the_scheduler_has_published_it() -> None:
    load = IDLE.model_copy(update={"pool": "strict", "wants": WantedLines(300, 500, 2)})
    assert ReplicaLoad(**load.model_dump()) == load
    assert ReplicaLoad.model_validate_json(load.model_dump_json()) == load


def test_any_replica_may_get_a_line_that_is_taken_over() -> None:
    long, short = (
        IDLE.model_copy(update={"pool": "strict", "wants": wants})
        for wants in (
            WantedLines(tokens=300, max_tokens=500, lines=2),
            WantedLines(tokens=1, max_tokens=400, lines=8),
        )
    )
    both = total([long, short])
    assert both.pool == "strict"
    assert both.wants == WantedLines(tokens=1, max_tokens=400, lines=2)
    assert total([long, short.model_copy(update={"wants": None})]).wants is None


def test_it_is_read_back_as_it_was_written_and_a_fault_is_told_with_its_place() -> None:
    text = BUSY.model_dump_json()
    assert read_json(ReplicaLoad, text, "http://engine") == BUSY
    with pytest.raises(InputFileError, match=r"http://engine: online\.running: must be"):
        read_json(ReplicaLoad, text.replace('"running":2', '"running":-2', 1), "http://engine")
