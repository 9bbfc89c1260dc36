"""The part of the time that online requests take."""

from __future__ import annotations

import pytest

from sglang_coserve.srt.monitoring.online_share import OnlineShare


def test_the_share_is_of_the_last_ten_seconds() -> None:
    share = OnlineShare()
    assert share.at(100.0, 0.0) == 0.0
    assert share.at(104.0, 1.0) == 0.25
    assert share.at(110.0, 5.0) == 0.5
    # Now the time since 104 counts, at least ten seconds of it.
    assert share.at(114.0, 6.0) == 0.5
    assert share.at(200.0, 6.0) == 0.0
    # Nothing was told for a while: since the time before that.
    assert share.at(201.0, 14.7) == pytest.approx(0.1)
