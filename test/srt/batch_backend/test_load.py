"""What the backend says of its model and its load."""

from __future__ import annotations

import pytest

from srt.batch_backend.served import COMPLETION, COMPLETIONS, Served


def test_the_load_is_known_once_something_was_served(served: Served) -> None:
    served.answer(COMPLETIONS, COMPLETION)
    rate = served.backend.load().offline_tokens_per_s
    assert rate is not None
    assert rate > 0


def test_the_model_is_told_apart_by_its_weights(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.backend.model
    assert served.manager.model_path in before
    assert served.backend.model == before
    monkeypatch.setattr(served.manager, "_config_updates", [])
    served.manager._update_weight_version_if_provided("2")
    reloaded = served.backend.model
    assert reloaded != before
    monkeypatch.setattr(served.manager, "model_path", "another")
    assert served.backend.model not in (before, reloaded)


def test_the_rate_is_that_of_the_time_with_work() -> None:
    from sglang_coserve.srt.batch_backend.token_rate import TokenRate

    now_s = 100.0
    rate = TokenRate(lambda: now_s, window_s=10)
    assert rate.per_s() is None
    with rate.in_flight():
        now_s += 1
        rate.add(50)
        now_s += 1
        assert rate.per_s() == 25
    now_s += 1000  # Idle.
    assert rate.per_s() == 25
    with rate.in_flight(), rate.in_flight():
        now_s += 8
        assert rate.per_s() == 5
        rate.add(100)
        now_s += 2
        assert rate.per_s() == 10  # The first 50 are out of the window.
        now_s += 8
        assert rate.per_s() is None
