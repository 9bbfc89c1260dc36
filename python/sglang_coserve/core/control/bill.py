"""What offline work cost online requests, in seconds, and whose work it was."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sglang_coserve.core.step import JobTokens

_MOST_JOBS: Final = 256
"""Jobs that are told apart, those that ran or were billed last: as many as may be unfinished by
default. So a server that runs for months does not fill its memory."""


_MOST_SINGLE_MARKS: Final = 256
"""Tracked requests beyond which several in a row share a mark. The charge to each job may be off by
a 256th of the work that a request waits for. Without sharing, 10,000 waiting requests kept 100 MB.
"""


WorkMark = Mapping[str | None, float]
"""Seconds of each job's work in this busy period, up to some moment; None: of no batch."""


class Delay(NamedTuple):
    """How much later than in the no-interference baseline the tokens of a request came."""

    ttft_s: float
    """The first one; negative where the baseline promises less than there was, since predictions
    err to both sides. Sums of these are right where sums of the positive ones would be too much."""

    total_s: float
    """The last one. What is between is made up for: a later gap that is shorter than in the
    baseline takes back what an earlier one added."""

    rid: str = ""
    """Whose it is."""

    last_s: float = 0.0
    """When the last one came."""

    @property
    def gaps_s(self) -> float:
        """What the gaps between its tokens added together; negative where they made up for a
        late first token."""
        return self.total_s - self.ttft_s


@dataclass(frozen=True, slots=True)
class BillReport:
    """Sums since the start. Times are those of last tokens unless they are of TTFT."""

    requests: int
    """Online requests that offline work ran beside or before, and that were billed."""

    ttft_s: float
    gaps_s: float
    jobs: Mapping[str, float]
    """By batch; those billed last."""

    unowned_s: float
    """For offline requests that are no lines of a batch."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.ttft_s + self.gaps_s


class Bill:
    """Adds up the delays of online requests, and charges them to jobs.

    The delay of a first token goes to the offline work between the request's arrival and that
    token, in proportion to the time. The delay of the other tokens goes to the offline work from
    there to the last token. If no offline work ran then, earlier online requests were delayed and
    delayed this request. Its delay goes to all offline work since the engine last had no online
    request, and to the step that ran when the first of these requests came. If no offline work ran
    in that time either, the delay has other reasons, and nobody is billed. An evicted prefix is an
    exception: its delay goes to the last offline work before. Of very many jobs, only the jobs that
    ran last are charged.
    """

    def __init__(self) -> None:
        self._work_s: OrderedDict[str | None, float] = OrderedDict()
        """In this busy period; the job that ran last stands last."""

        self._last_s: dict[str | None, float] = {}
        """Of the last step with offline work."""

        self._mark: WorkMark | None = None
        """The newest mark; None when the next call must make one."""

        self._given = 0
        """Number of times that the newest mark was returned."""

        self._is_behind = False
        """True when offline work ran since the newest mark was made."""

        self._billed_s: OrderedDict[str | None, float] = OrderedDict()
        """The one that was billed last stands last."""

        self._delays: deque[Delay] = deque(maxlen=16 * _MOST_JOBS)
        """Those that wait to be taken: more than end in a second, which is when that is done."""

        self._requests = 0
        self._ttft_s = 0.0
        self._gaps_s = 0.0

    def period_begins(self, *, beside_offline: bool) -> None:
        """Note that no online request is in: no delay is left over. O(jobs of a step).

        ``beside_offline`` says that the engine has offline requests. What it does of them may be
        suspended, and is then reported only when it has ended.
        """
        self._work_s.clear()
        self._mark = None
        if beside_offline:
            _add_to(self._work_s, self._last_s)

    def worked(self, offline_s: float, jobs: Sequence[JobTokens]) -> None:
        """Note how long a step took for offline work, and whose it was; O(jobs in it)."""
        if offline_s <= 0:
            return
        total = sum(tokens for _, tokens in jobs)
        if total:
            self._last_s = {job: offline_s * tokens / total for job, tokens in jobs}
        else:
            self._last_s = {None: offline_s}
        _add_to(self._work_s, self._last_s)
        self._is_behind = True

    def mark(self, in_use: int = 0, since: WorkMark | None = None) -> WorkMark:
        """Return the work so far; O(jobs told apart).

        Where ``in_use`` requests have marks, and these are very many, several in a row share a
        mark: work between them counts as after the mark. ``since`` is an earlier mark, which is
        returned again only if there was no work after it.
        """
        is_worn = self._given > in_use // _MOST_SINGLE_MARKS or self._mark is since
        if self._mark is None or (self._is_behind and is_worn):
            self._mark = dict(self._work_s)
            self._given, self._is_behind = 0, False
        self._given += 1
        return self._mark

    def charge(
        self, delay: Delay, arrived: WorkMark, first: WorkMark, *, lost_prefix: bool = False
    ) -> bool:
        """Bill an online request that has ended in the engine and in the baseline.

        ``arrived`` and ``first`` are the work when it arrived and at its first token.
        ``lost_prefix`` says that the engine computed tokens that were cached in the baseline.
        Return False when there was no offline work that could have delayed it. O(jobs told apart).
        """
        now = dict(self._work_s) or (dict(self._last_s) if lost_prefix else {})
        if not now:
            return False
        self._requests += 1
        self._delays.append(delay)
        self._ttft_s += delay.ttft_s
        self._gaps_s += delay.gaps_s
        self._split(delay.ttft_s, first, arrived, now)
        self._split(delay.gaps_s, now, first, now)
        return True

    def take_delays(self) -> list[Delay]:
        """Return the delays that were billed since the last call, the newest of very many."""
        delays = list(self._delays)
        self._delays.clear()
        return delays

    def report(self) -> BillReport:
        """Return the sums. O(jobs)."""
        jobs = {job: seconds for job, seconds in self._billed_s.items() if job is not None}
        unowned_s = self._billed_s.get(None, 0.0)
        return BillReport(self._requests, self._ttft_s, self._gaps_s, jobs, unowned_s)

    def _split(self, seconds: float, until: WorkMark, since: WorkMark, all_work: WorkMark) -> None:
        if not seconds:
            return
        # What was forgotten and came back has less now than then.
        work_s = {job: max(work - since.get(job, 0.0), 0.0) for job, work in until.items()}
        if not any(work_s.values()):
            work_s = dict(all_work)
        whole_s = sum(work_s.values())
        shares_s = {job: seconds * part_s / whole_s for job, part_s in work_s.items() if part_s}
        _add_to(self._billed_s, shares_s)


def _add_to(sums: OrderedDict[str | None, float], more: WorkMark) -> None:
    """Add to the sums of jobs, and keep only those that were added to last."""
    for job, seconds in more.items():
        sums[job] = sums.get(job, 0.0) + seconds
        sums.move_to_end(job)
    while len(sums) > _MOST_JOBS:
        sums.popitem(last=False)
