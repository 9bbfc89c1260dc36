"""What the papers compare with.

First come, first served, as in stock SGLang; priorities; Sarathi-Serve with two classes; online
work alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import ClassVar

from sglang_coserve.core.planning.offline_phase import decode_offline, prefill_offline
from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.planning.step_memory import Prompt
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import Bound


@dataclass
class FcfsPolicy(Policy):
    """Serves online and offline requests in one queue, by arrival.

    The scheduling that BROS (§II-B) starts from, as in a server without request
    classes: chunked prefill mixed with decodes under a fixed
    token budget, without preemption. If KV runs out, the last admitted request is
    retracted. Needs an offline queue ordered by arrival; a request
    whose deadline is at risk goes before other offline ones, not before online ones.
    """

    name: ClassVar[str] = "fcfs"
    is_preemptive: ClassVar[bool] = False

    chunk_tokens: int = 8192
    """Most tokens of a step, prefill and decode together."""

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        batch.limit_tokens(self.chunk_tokens)
        self._decode(batch)
        for prefilling in batch.online_prefills + batch.offline_prefills:
            is_retracted = batch.memory.is_retracted(prefilling)
            if not is_retracted and not self._prefill(batch, Prompt.of(prefilling)):
                return
        config, num_requests = batch.context.config, len(batch.snapshot.admitted)
        for _, prompt in islice(self._by_arrival(batch), config.max_picks):
            spare_tokens = batch.memory.headroom_tokens(config.headroom_tokens, num_requests)
            if not self._prefill(batch, prompt, spare_tokens):
                return
            num_requests += 1

    def _decode(self, batch: StepBuilder) -> None:
        requests, memory = batch.online_decodes + batch.offline_decodes, batch.memory
        last_first = list(reversed(batch.snapshot.admitted))
        while not memory.has_room(needed := memory.kv_to_decode(requests), requests=len(requests)):
            request = last_first.pop(0)
            memory.retract(request, needed)
            if request in requests:
                requests.remove(request)
        batch.decode(requests)

    def _prefill(self, batch: StepBuilder, prompt: Prompt, spare_tokens: int = 0) -> bool:
        """Add the longest chunk that fits; return whether it completes the prompt."""
        tokens = batch.longest_chunk(prompt, math.inf)
        kv_tokens = batch.memory.kv_to_prefill(prompt) + spare_tokens
        if tokens == 0 or not batch.memory.has_room(kv_tokens, prompt.is_new):
            return False
        batch.prefill(prompt, tokens)
        return tokens == prompt.rest_tokens

    @staticmethod
    def _by_arrival(batch: StepBuilder) -> Iterator[tuple[float, Prompt]]:
        online = ((one.info.arrival_s, Prompt.of(one)) for one in batch.snapshot.waiting)
        offline = ((one.arrival_s, prompt) for one, prompt in batch.candidates())
        return heapq.merge(online, offline, key=itemgetter(0))


def serve_by_priority(batch: StepBuilder, max_tokens: int, *, may_retract: bool) -> None:
    """Add all decodes, then online prefills, then offline prefills, up to ``max_tokens``.

    Offline decodes run regardless of latency. With ``may_retract``, offline requests are retracted
    for an online request that lacks KV or a slot.
    """
    max_tokens = min(max_tokens, batch.free_tokens)
    decode_online(batch)
    # Tokens are reserved for the offline decodes, because prefills must not stall them. They are
    # added after the online prefills, because those may still retract them.
    reserved_tokens = len(batch.offline_decodes)
    batch.limit_tokens(max(max_tokens - batch.stats.decode_requests - reserved_tokens, 0))
    prefill_online(batch, math.inf, may_retract=may_retract)
    left_tokens = batch.free_tokens if batch.offline_budget_s else 0
    batch.raise_offline(math.inf, Bound.NONE)
    batch.free_tokens = reserved_tokens
    decode_offline(batch, batch.offline_decodes)
    batch.free_tokens = left_tokens
    prefill_offline(batch)


@dataclass
class OnlineOnlyPolicy(Policy):
    """Chunked prefill with a fixed token budget; offline requests never run.

    The *Online-Only* of ConServe §6.1 and the pure online serving of HyGen §5.1:
    the latencies that an SLO tolerance is relative to.
    """

    name: ClassVar[str] = "online_only"

    chunk_tokens: int = 2048
    """Most tokens of a step, prefill and decode together (Sarathi-Serve's budget)."""

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        batch.limit_tokens(self.chunk_tokens)
        decode_online(batch)
        prefill_online(batch, math.inf)
        batch.limit_offline(0.0, Bound.BUDGET)


@dataclass
class SarathiPolicy(Policy):
    """Sarathi-Serve with two priorities and preemption: the papers' strongest baseline.

    Stall-free batching under a fixed token budget, online first: ConServe's
    *Sarathi-Preemptive* (§6.1) and HyGen's *Sarathi++* (§5.1). Every step has all decodes, and
    prefill chunks up to the budget, those of online requests first. Offline requests are
    retracted when memory is short. Latency is not considered: a step with the same token budget
    is short with little cached context and long with much (ConServe §4.2).
    """

    name: ClassVar[str] = "sarathi"
    is_preemptive: ClassVar[bool] = False
    may_retract: ClassVar[bool] = True
    """Whether offline requests are retracted for an online one that lacks KV."""

    chunk_tokens: int = 2048
    """Tokens of a step, prefill and decode together."""

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        serve_by_priority(batch, self.chunk_tokens, may_retract=self.may_retract)


@dataclass
class NonPreemptivePolicy(SarathiPolicy):
    """Sarathi-Serve with two priorities but no preemption.

    ConServe's *Non-Preemptive* (§3.2, §6.1), an upper bound of offline throughput:
    online requests are admitted first, but wait for KV until running requests
    end. Only when decodes run out of KV is the last admitted offline request retracted,
    as in any engine.
    """

    name: ClassVar[str] = "non_preemptive"
    may_retract: ClassVar[bool] = False


@dataclass
class PriorityPolicy(Policy):
    """Stock SGLang with ``--enable-priority-scheduling``: offline requests have the lower priority.

    Requests are served by priority, then arrival; running ones are retracted for a higher
    priority. The chunk size bounds prefill tokens only; all decodes run. For an online request
    that lacks KV or a slot, offline requests are retracted, the last admitted
    first, whatever their state. Offline and online prefills of one
    step differ only in their order.

    Differences from SGLang: decodes run along with prefills, as with
    ``--enable-mixed-chunk``; the stock default stalls them for every prefill.
    The first tokens of a retracted request stay in the prefix cache.
    """

    name: ClassVar[str] = "priority"
    is_preemptive: ClassVar[bool] = False

    chunk_tokens: int = 8192
    """Prefill tokens of a step (``--chunked-prefill-size``)."""

    def victims(self, batch: StepBuilder) -> Sequence[Request]:
        """See ``Policy.victims``: the last admitted first."""
        return [one for one in reversed(batch.snapshot.admitted) if not one.info.is_online]

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        decodes = len(batch.online_decodes) + len(batch.offline_decodes)
        serve_by_priority(batch, self.chunk_tokens + decodes, may_retract=True)
