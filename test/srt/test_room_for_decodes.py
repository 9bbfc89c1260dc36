"""The outputs that SGLang expects after offline requests gave way to decodes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components import new_token_ratio_tracker

from sglang_coserve.srt import compat
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction

ESTIMATE = new_token_ratio_tracker.NewTokenRatioTracker.estimate_new_token_ratio_after_retract


class FullBatch:
    """Decodes for which there is no KV while more than ``fitting`` are in it."""

    def __init__(self, count: int, fitting: int) -> None:
        params = SimpleNamespace(max_new_tokens=100)
        self.reqs = [SimpleNamespace(output_ids=[1] * 30, sampling_params=params)] * count
        self._fitting = fitting

    def batch_size(self) -> int:
        return len(self.reqs)

    def check_decode_mem(self) -> bool:
        return len(self.reqs) <= self._fitting


@pytest.mark.parametrize(("fitting", "ratio"), [(2, (60 + 2 * 20) / 201), (0, 0.7)])
def test_a_batch_that_was_emptied_leaves_the_expected_outputs_as_they_were(
    monkeypatch: pytest.MonkeyPatch, fitting: int, ratio: float
) -> None:
    tracker = SimpleNamespace(current=0.7, estimate_new_token_ratio_after_retract=ESTIMATE)
    scheduler: Any = SimpleNamespace(new_token_ratio_tracker=tracker, page_size=1)
    view: Any = SimpleNamespace(elsewhere=list, paused_requests=[object()])
    pools: Any = SimpleNamespace(headroom_tokens=0)
    retraction = OfflineRetraction(scheduler, pools, view, Counter(), lambda _: None)
    monkeypatch.setattr(compat, "drop_ended", lambda _: None)
    monkeypatch.setattr(retraction, "retract_one", lambda batch: bool(batch.reqs.pop()))
    batch: Any = FullBatch(3, fitting)
    retraction.make_room_for_decodes(batch)
    assert len(batch.reqs) == fitting
    assert tracker.current == pytest.approx(ratio)
