"""What is found out of the waiting offline requests is kept for all steps that a plan composes."""

from __future__ import annotations

from itertools import islice

from core.scheduler.scenarios import queued
from sglang_coserve.core.offline_queue import OfflineQueue, OfflineQueueConfig
from sglang_coserve.core.planning.offline_candidates import OfflineCandidates


class CountedCache:
    """Answers with the number of the lookup, and remembers whose prefix was looked up."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cached_tokens(self, rid: str) -> int:
        """Count the lookup."""
        self.asked.append(rid)
        return len(self.asked)


def test_each_is_looked_up_once_and_only_when_it_is_asked_for() -> None:
    queue = OfflineQueue(OfflineQueueConfig.fcfs())
    for rid in ("a", "b", "c"):
        queue.add(queued(rid=rid))
    cache = CountedCache()
    candidates = OfflineCandidates(queue, cache, 0.0)
    assert cache.asked == []
    first = [(request.rid, tokens) for request, tokens in islice(candidates, 2)]
    assert first == [("a", 1), ("b", 2)]
    assert cache.asked == ["a", "b"]
    assert [(request.rid, tokens) for request, tokens in candidates] == [*first, ("c", 3)]
    assert [request.rid for request, _ in candidates] == ["a", "b", "c"]
    assert cache.asked == ["a", "b", "c"]
