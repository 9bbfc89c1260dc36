"""The interface of scheduling policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar, Final

from sglang_coserve.core.offline_queue import OfflineQueueConfig
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.ranges import check_ranges
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import StepPlan, StepResult

_RANK: Final = MappingProxyType(
    {
        RequestState.PARKED: 0,
        RequestState.PAUSED: 1,
        RequestState.PREFILLING: 2,
        RequestState.DECODING: 2,
    }
)


def retraction_rank(request: Request) -> int:
    """Return the rank of a request among those to retract, the lowest first.

    Parked requests have 0, paused ones 1, running ones 2.
    """
    return _RANK[request.state]


class Policy(ABC):
    """Composes the batch of one step: a paper's algorithm on top of the shared code.

    ``compose`` must depend only on its arguments and the policy's state, and must not change
    that state. Only ``update``, ``retracted`` and ``finished`` may change it.

    A policy is a dataclass, and its fields are its settings.

    Raises:
        ConfigError: on construction, when a setting is out of range; the message names it.
    """

    name: ClassVar[str]

    is_preemptive: ClassVar[bool] = True
    """Whether offline-only steps are suspended for online work, if the engine can do so."""

    lets_arrivals_wait: ClassVar[bool] = False
    """Whether such a step runs to its end if the first token of an arrival is in time even so."""

    averages_tpot: ClassVar[bool] = False
    """True if a TPOT target is the mean over a request. False, as in the papers, if it limits
    each gap."""

    protects_prefixes: ClassVar[bool] = False
    """True if offline requests leave KV to the prefixes that online requests come back to. False,
    as in the papers, if they take all KV."""

    def __post_init__(self) -> None:
        """Check the settings, which are the fields of a policy."""
        check_ranges(self, f"policy {self.name}: {{}}".format)

    @abstractmethod
    def compose(self, batch: StepBuilder) -> None:
        """Add the work of the next step to the empty batch."""

    def queue_config(self, seed: int = 0) -> OfflineQueueConfig:
        """Return the settings of the offline queue, which give its order.

        The queue of this class begins with requests whose deadline is at risk; the others follow
        by arrival. ``seed`` makes random picks reproducible.
        """
        return OfflineQueueConfig(utility_ratio=0.0, longest_first=False, seed=seed)

    def victims(self, batch: StepBuilder) -> Sequence[Request]:
        """Return the offline requests that may be retracted, the first to retract first.

        The order of this class: parked requests, paused ones, running ones. Within each group the
        last admitted comes first, since the oldest are closest to their end. Called only when KV
        is short. O(requests log requests).
        """
        places = {request.info.rid: place for place, request in enumerate(batch.snapshot.admitted)}
        return sorted(
            batch.offline,
            key=lambda request: (retraction_rank(request), -places[request.info.rid]),
        )

    def update(self, plan: StepPlan, result: StepResult) -> None:  # noqa: B027
        """Learn from the result of a step, of which at least a part ran."""

    def retracted(self) -> None:  # noqa: B027
        """Record that an offline request was retracted."""

    def finished(self) -> None:  # noqa: B027
        """Record that an admitted offline request has ended."""
