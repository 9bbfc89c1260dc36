"""When a request arrived at the server, told to the scheduler.

A request that arrives during an iteration reaches the scheduler only at its end;
what it waited by then is lost to a scheduler that counts from there.  SGLang
leaves the time of arrival out of the message it sends; here it is put in.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

__all__ = ["ArrivalTimeStats", "arrival_s", "install_arrival_times"]


class ArrivalTimeStats(APIServerReqTimeStats):
    """SGLang's times of a request, with that of its arrival sent along."""

    def __getstate__(self) -> object:
        """Return what is sent to the scheduler."""
        state = super().__getstate__()
        assert isinstance(state, dict)
        # SGLang's counterpart translates values whose name ends like this to its own clock.
        return {**state, "created_time": self.created_time}


def install_arrival_times() -> None:
    """Let SGLang's tokenizer manager, in this process, send arrival times."""
    from sglang.srt.managers import tokenizer_manager

    tokenizer_manager.APIServerReqTimeStats = ArrivalTimeStats


def arrival_s(received: Any, now_s: float) -> float:
    """Return when a request arrived, at most ``now_s``; that itself when it is not known.

    ``received`` is SGLang's ``Req``, or the message that it is made of. The clock is
    ``time.perf_counter`` of this process.
    """
    created_s = getattr(getattr(received, "time_stats", None), "created_time", 0.0)
    return min(created_s, now_s) if created_s else now_s
