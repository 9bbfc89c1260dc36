"""When a request arrived at the server, told to the scheduler.

A request that arrives during an iteration reaches the scheduler only at its end;
what it waited by then is lost to a scheduler that counts from there.  SGLang
leaves the time of arrival out of the message it sends; here it is put in.

Nor does a client have a token when the scheduler does: the token goes through
the detokenizer and the HTTP server, some milliseconds where these share busy
cores.  Targets are meant where the client is, so what is put in is earlier than
the arrival by what first tokens have taken for that way (``OutputDelay``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

from sglang_coserve.srt import compat

__all__ = ["ArrivalTimeStats", "OutputDelay", "arrival_s", "install_arrival_times"]

_WEIGHT: Final = 1 / 16
_TIMED_EVERY: Final = 4
"""SGLang's scheduler sends its times with every token of a request that asks for them."""


class ArrivalTimeStats(APIServerReqTimeStats):
    """SGLang's times of a request, with that of its arrival sent along."""

    output_delay_s: float = 0.0
    is_timed: bool = False

    def __getstate__(self) -> object:
        """Return what is sent to the scheduler."""
        state = super().__getstate__()
        assert isinstance(state, dict)
        # SGLang's counterpart translates values whose name ends like this to its own clock.
        state["created_time"] = self.created_time - self.output_delay_s
        if self.is_timed:
            state["has_timing_data"] = True
        return state


class OutputDelay:
    """How long first tokens take from the scheduler to the HTTP server."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """Of the last few dozen requests, the recent ones counting more; 0 before the first."""
        self._num_requests = 0

    def make_stats(self, *args: Any, **kwargs: Any) -> ArrivalTimeStats:
        """Return what SGLang keeps of a new request's times; takes its arguments."""
        stats = ArrivalTimeStats(*args, **kwargs)
        stats.output_delay_s = self.mean_s
        stats.is_timed = self._num_requests % _TIMED_EVERY == 0
        self._num_requests += 1
        return stats

    def without_token(self, rids: Sequence[str], states: Mapping[str, Any]) -> dict[int, Any]:
        """Return the times of the requests that have yet to get their first token, by index.

        Only of those that the scheduler sends its own times of. O(rows).
        """
        times = ((i, states[rid].time_stats) for i, rid in enumerate(rids) if rid in states)
        return {i: t for i, t in times if t.is_timed and not t.first_token_time}

    def observe(self, times: Mapping[int, Any], scheduler_times: Sequence[Any] | None) -> None:
        """Take the requests of ``without_token`` into account, once they have their token.

        ``scheduler_times`` are those that came with the tokens of the whole batch.
        """
        for index, stats in times.items():
            sent_s = scheduler_times[index].prefill_finished_time if scheduler_times else 0.0
            if sent_s and stats.first_token_time:
                # Since 0.5.22 SGLang may take the scheduler's time for that of the first token.
                delay_s = max(stats.last_time - sent_s, 0.0)
                self.mean_s += (_WEIGHT if self.mean_s else 1.0) * (delay_s - self.mean_s)


def install_arrival_times() -> OutputDelay:
    """Let SGLang's tokenizer manager, in this process, send arrival times.

    Returns what is to be told of the tokens that come back.
    """
    delay = OutputDelay()
    compat.replace("sglang.srt.managers.tokenizer_manager.APIServerReqTimeStats", delay.make_stats)
    return delay


def arrival_s(received: Any, now_s: float) -> float:
    """Return when a request arrived, at most ``now_s``; that itself when it is not known.

    ``received`` is SGLang's ``Req``, or the message that it is made of. The clock is
    ``time.perf_counter`` of this process.
    """
    created_s = getattr(getattr(received, "time_stats", None), "created_time", 0.0)
    return min(created_s, now_s) if created_s else now_s
