"""The recompute tax: tokens that are computed twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.monitoring.recompute_meter import RecomputeMeter
from srt.kv_checkpoint.bare_cache import new_request


def ran(meter: RecomputeMeter, reqs: list[Any], extends: Sequence[tuple[int, int]] = ()) -> None:
    """Let a batch end that gives its whole requests a token; ``extends`` are (cached, computed)
    tokens by request of a prefill."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    mode = ForwardMode.EXTEND if extends else ForwardMode.DECODE
    batch = ScheduleBatch(reqs=reqs, forward_mode=mode)
    batch.prefix_lens = [begin for begin, _ in extends]
    batch.extend_lens = [tokens for _, tokens in extends]
    ends = [sum(extend) for extend in extends] or [math.inf] * len(reqs)
    for req, end in zip(reqs, ends, strict=True):
        if end >= len(req.origin_input_ids) + len(req.output_ids):
            req.output_ids.append(7)
    meter.ran(batch, list(map(is_offline, reqs)))


def taxes(meter: RecomputeMeter, name: str) -> tuple[int, int]:
    stats = meter.state()[name]
    return stats["recomputed_tokens"], stats["computed_tokens"]


def test_tokens_count_as_recomputed_up_to_where_the_request_had_been() -> None:
    meter = RecomputeMeter()
    offline, online = (new_request(rid, range(100), offline=rid == "off") for rid in ("off", "on"))
    ran(meter, [offline, online], [(0, 100), (40, 60)])
    for _ in range(20):
        ran(meter, [offline])
    assert taxes(meter, "offline") == (0, 120)
    # It resumes from its first 96 tokens: of the 120 that had KV, 24 are computed again.
    ran(meter, [offline], [(96, 25)])
    assert taxes(meter, "offline") == (24, 145)
    ran(meter, [offline])
    # And again, in two chunks.
    ran(meter, [offline], [(64, 32)])
    ran(meter, [offline], [(96, 27)])
    assert taxes(meter, "offline") == (24 + 32 + 26, 146 + 32 + 27)
    assert taxes(meter, "online") == (0, 60)


def test_a_prompt_whose_prefill_was_interrupted_counts_once() -> None:
    meter, req = RecomputeMeter(), new_request("off", range(100), offline=True)
    ran(meter, [req], [(0, 64)])
    ran(meter, [req], [(48, 52)])
    assert taxes(meter, "offline") == (16, 116)
