"""The offline queue against a model that sorts lists for every pick."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from core.offline_queue.naive_trie import NaiveTrie, Prompt
from core.offline_queue.offline_requests import check_trie, num_shared_tokens, offline, pick
from sglang_coserve.core.offline_queue import (
    OfflineQueue,
    OfflineQueueConfig,
    QueuedRequest,
    pack_tokens,
)

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
configs = st.builds(
    OfflineQueueConfig,
    utility_ratio=st.sampled_from([0.0, 0.5, 1.0]),
    max_overtakes=st.sampled_from([None, 0, 1, 3]),
    deadline_slack_s=st.sampled_from([0.0, 3.0]),
    longest_first=st.booleans(),
    seed=st.integers(0, 3),
)


class NaiveQueue:
    """The four rules, over all requests each time."""

    def __init__(self, config: OfflineQueueConfig) -> None:
        self.config = config
        self.trie = NaiveTrie()
        self.requests: dict[int, QueuedRequest] = {}
        self.random = random.Random(config.seed)
        self.draw = self.random.random()
        self.last_prompt: Prompt = ()
        self.num_overtakes = 0
        self.is_urgent = False
        self.without_room: set[int] = set()

    def stalest(self) -> int:
        return min(self.trie.waiting, key=lambda n: (self.requests[n].arrival_s, n))

    def next(self, now_s: float) -> int | None:
        config = self.config
        if not self.trie.waiting:
            return None
        stalest = self.stalest()
        if config.max_overtakes is not None and self.num_overtakes >= config.max_overtakes:
            return stalest
        slack_s, urgent = min((self.slack_s(n, now_s), n) for n in self.trie.waiting)
        if slack_s < config.deadline_slack_s and not self.is_urgent:
            return urgent
        if config.longest_first and (longest := self.longest()) is not None:
            return longest
        if self.draw < config.utility_ratio:
            return self.trie.near(self.last_prompt)[0]
        return stalest

    def longest(self) -> int | None:
        """The request that would end last if it did not start now."""
        services_s = {n: self.requests[n].estimated_service_s for n in self.trie.waiting}
        number = min(services_s, key=lambda n: (-services_s[n], n))
        own_s, total_s = services_s[number], sum(services_s.values())
        num_running = max(1, len(self.requests) - len(services_s))
        is_long = own_s * len(services_s) > total_s * (1 + 1e-6)
        return number if is_long and own_s * num_running >= total_s else None

    def slack_s(self, number: int, now_s: float) -> float:
        request = self.requests[number]
        if request.deadline_s is None:
            return math.inf
        slack_s = request.deadline_s - request.estimated_service_s - now_s
        # A deadline that cannot be met counts as none.
        return math.inf if slack_s < 0 else slack_s

    def starts_s(self, number: int) -> float:
        latest_s = self.requests[number].latest_start_s
        return math.inf if latest_s is None else latest_s

    def take(self, number: int) -> None:
        stalest = self.stalest()
        self.num_overtakes = 0 if number == stalest else self.num_overtakes + 1
        earlier_s = self.starts_s(stalest) - self.starts_s(number)
        self.is_urgent = earlier_s > self.config.deadline_slack_s
        self.draw = self.random.random()
        self.last_prompt = self.trie.prompts[number]
        self.trie.suspend(number)
        self.without_room.clear()

    def leave_a_candidate(self) -> None:
        self.without_room &= {*self.trie.waiting}
        if len(self.without_room) == len(self.trie.waiting):
            self.without_room.clear()

    def cached(self, number: int, num_cached: int) -> None:
        follower = self.trie.near(self.last_prompt)[0]
        if num_cached > num_shared_tokens(self.last_prompt, self.trie.prompts[follower]):
            self.last_prompt = self.trie.prompts[number]
        self.trie.promote(number, num_cached)

    def upcoming(self, now_s: float) -> list[str]:
        """The order in which everything that waits would be picked, but for what has no room."""
        ahead = copy.deepcopy(self)
        rids = []
        while (number := ahead.next(now_s)) is not None:
            ahead.take(number)
            if number not in self.without_room:
                rids.append(self.requests[number].rid)
        return rids


class QueueMachine(RuleBasedStateMachine):
    """Every event of a scheduler, in any order, while time goes on."""

    @initialize(config=configs)
    def start(self, config: OfflineQueueConfig) -> None:
        self.queue = OfflineQueue(config)
        self.naive = NaiveQueue(config)
        self.num_added = 0
        self.now_s = 0.0

    def waiting(self) -> list[int]:
        return list(self.naive.trie.waiting)

    def running(self) -> list[int]:
        return [n for n in self.naive.requests if n not in self.naive.trie.waiting]

    @rule(
        prompt=prompts,
        age_s=st.integers(0, 4),
        time_left_s=st.none() | st.integers(0, 12),
        service_s=st.integers(0, 4),
    )
    def add(self, prompt: Prompt, age_s: int, time_left_s: int | None, service_s: int) -> None:
        number = self.num_added
        self.num_added += 1
        request = offline(
            f"r{number}",
            prompt,
            arrival_s=self.now_s - age_s,
            deadline_s=None if time_left_s is None else self.now_s + time_left_s,
            estimated_service_s=service_s,
        )
        self.queue.add(request)
        self.naive.requests[number] = request
        self.naive.trie.insert(number, prompt)

    @rule()
    def pick(self) -> None:
        ahead = self.naive.upcoming(self.now_s)
        request = pick(self.queue, self.now_s)
        assert (None if request is None else request.rid) == next(iter(ahead), None)
        if request is not None:
            number = int(request.rid[1:])
            assert request == self.naive.requests[number]
            self.naive.take(number)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.waiting()))
        self.queue.take(f"r{number}")
        self.naive.take(number)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), num_tokens=st.integers(0, 3), service_s=st.integers(0, 4))
    def restore(self, data: st.DataObject, num_tokens: int, service_s: int) -> None:
        number = data.draw(st.sampled_from(self.running()))
        request = self.queue.running(f"r{number}")
        assert request == self.naive.requests[number]
        num_tokens += request.num_generated_tokens
        request = replace(request, num_generated_tokens=num_tokens, estimated_service_s=service_s)
        self.queue.restore(request)
        self.naive.requests[number] = request
        self.naive.trie.resume(number)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def find_cached(self, data: st.DataObject, num_tokens: int) -> None:
        number = data.draw(st.sampled_from(self.waiting()))
        num_tokens = min(num_tokens, len(self.naive.trie.prompts[number]))
        self.queue.cached(f"r{number}", num_tokens)
        self.naive.cached(number, num_tokens)

    @rule(data=st.data())
    def find_no_room(self, data: st.DataObject) -> None:
        """Also for one that runs, has ended or never came, of which nothing is noted."""
        number = data.draw(st.integers(0, self.num_added))
        self.queue.no_room(f"r{number}")
        self.naive.without_room.add(number)
        self.naive.leave_a_candidate()

    @rule(prompt=prompts)
    def look_for_the_nearest(self, prompt: Prompt) -> None:
        found = self.queue.nearest(pack_tokens(prompt))
        nearest = self.naive.trie.near(prompt)
        assert found == (self.naive.requests[nearest[0]] if nearest else None)

    @precondition(lambda self: self.naive.requests)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.naive.requests)))
        assert self.queue.remove(f"r{number}") == self.naive.requests.pop(number)
        self.naive.trie.remove(number)
        self.naive.leave_a_candidate()

    @rule(seconds=st.integers(1, 5))
    def let_time_pass(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(num_candidates=st.integers(0, 20))
    def look_ahead(self, num_candidates: int) -> None:
        candidates = itertools.islice(self.queue.candidates(self.now_s), num_candidates)
        rids = [request.rid for request in candidates]
        assert rids == self.naive.upcoming(self.now_s)[:num_candidates]

    @invariant()
    def agrees(self) -> None:
        check_trie(self.queue._trie)
        assert {leaf.number for leaf in self.queue._no_room} == self.naive.without_room
        waiting, running = self.waiting(), self.running()
        assert len(self.queue) == len(waiting)
        assert self.queue.num_running == len(running)
        assert all(f"r{number}" in self.queue for number in waiting)
        assert not any(f"r{number}" in self.queue for number in running)
        assert all(self.queue.is_running(f"r{number}") for number in running)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
