"""The last steps of a scheduler, for Perfetto: what ran when, up to which layer, and who was in it.

The scheduler keeps plain values; whoever asks for them makes the events, in the Trace Event Format:
slices for what ran, and a span for each request with marks in it. Each event is a line of JSON.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic_core import to_json

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.forward_kind import ForwardKind, prefilled
from sglang_coserve.srt.monitoring.latencies import LatencyHistograms
from sglang_coserve.srt.steps.offline_lane import OfflineLane
from sglang_coserve.srt.steps.request_ledger import RequestLedger

Req = Any
ScheduleBatch = Any


def trace_text(events: Iterable[str]) -> str:
    """Return the file of these events, which may come in any order."""
    return "[\n" + ",\n".join(events) + "\n]\n"


def process_name(name: str, *, process: int) -> str:
    """Return the event that names what the others are of."""
    return _event({"ph": "M", "name": "process_name", "args": {"name": name}}, process)


def _event(fields: Mapping[str, object], process: int) -> str:
    return to_json({"pid": process, "tid": 1, **fields}, ensure_ascii=True).decode()


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


_MOST_RECORDS: Final = 1 << 14
"""Some minutes of steps and requests; about 10 MB at most, with as many names as below."""

_MOST_NAMES: Final = 32
"""Requests of a class that a step names; their number is there in any case."""

_MOST_UNDER_WAY: Final = 64
"""Batches without results: far more than overlap scheduling or a pipeline has."""

_STEP, _BEGIN, _FIRST, _END = range(4)

Record = Sequence[Any]
"""What kind it is, when it ended or happened, and the rest of it."""


class StepTrace:
    """A ring of records, the latest ones; for one rank.

    A step lasts from when it was launched, or the one before it ended, until its results are
    in. What ran beside the scheduler on a GPU ended a little earlier.
    """

    def __init__(self, latencies: LatencyHistograms | None = None) -> None:
        """Begin without steps. ``latencies`` are told of tokens, too."""
        self._latencies = latencies
        self._records: deque[Record] = deque(maxlen=_MOST_RECORDS)
        self._launched: deque[tuple[float, int]] = deque(maxlen=_MOST_UNDER_WAY)
        self._ended_s = 0.0
        self._live: dict[str, RequestInfo] = {}
        """Requests that have begun, and have not ended."""

        self._last_s: dict[str, float] = {}
        """When the last token of each of them came out."""

    def launched(
        self, batch: ScheduleBatch, now_s: float, lane: OfflineLane, ledger: RequestLedger
    ) -> None:
        """Take in that a batch is about to run; before the ledger's ``launched``. O(prompts)."""
        held = lane.suspended
        goes_on = held is not None and held.batch is batch
        self._launched.append((now_s, held.layer if held is not None and goes_on else 0))
        if not batch.forward_mode.is_extend():
            return
        # Requests that decode beside prompts have begun.
        for req, cached_tokens in zip(prefilled(batch), batch.prefix_lens, strict=False):
            if req.rid in ledger and not ledger.has_begun(req.rid):
                self._begin(ledger[req.rid].info, cached_tokens, now_s)

    def _begin(self, info: RequestInfo, cached_tokens: int, now_s: float) -> None:
        self._live[info.rid] = info
        kind = info.request_class.value
        self._records.append((_BEGIN, info.arrival_s, info.rid, kind, info.prompt_tokens, info.job))
        if self._latencies is not None:
            self._latencies.begun(info, cached_tokens, now_s)

    def ended(
        self,
        now_s: float,
        reqs: Sequence[Req],
        kind: ForwardKind | None,
        has_token: Sequence[bool] = (),
        stopped_at: int | None = None,
    ) -> None:
        """Take in that the batch that was launched first has its results, or was suspended.

        O(requests). ``kind`` is what they did, ``has_token`` says which of them got a token: none
        where it was suspended. ``stopped_at`` is then the first layer that has not run.
        """
        if not self._launched:
            return
        launched_s, first_layer = self._launched.popleft()
        start_s = max(launched_s, self._ended_s)
        self._ended_s = now_s
        live, rids = self._live, [req.rid for req in reqs]
        online: list[str] = []
        offline: list[str] = []
        for rid in rids:
            info = live.get(rid)
            (online if info is None or info.is_online else offline).append(rid)
        name = "other" if kind is None else kind.value
        counts = len(online), len(offline)
        names = online[:_MOST_NAMES], offline[:_MOST_NAMES]
        self._records.append((_STEP, now_s, start_s, name, first_layer, stopped_at, counts, names))
        if self._latencies is not None or len(self._last_s) < len(live):
            self._take_tokens(rids, has_token, now_s)

    def _take_tokens(self, rids: Sequence[str], has_token: Sequence[bool], now_s: float) -> None:
        last_s = self._last_s
        gaps: Counter[tuple[bool, float]] = Counter()
        for rid, has in zip(rids, has_token, strict=False):
            if not has or (info := self._live.get(rid)) is None:  # It was aborted meanwhile.
                continue
            if (before_s := last_s.get(rid)) is not None:
                gaps[info.is_online, before_s] += 1
            else:
                self._records.append((_FIRST, now_s, rid, info.request_class.value))
                if self._latencies is not None:
                    self._latencies.first_token(info, now_s)
            last_s[rid] = now_s
        if self._latencies is not None:
            # Those that end with one step are mostly equal.
            for (is_online, before_s), count in gaps.items():
                self._latencies.gaps_ended(is_online, now_s - before_s, count)

    def forget(self, rid: str, now_s: float) -> None:
        """Take in that a request has ended."""
        self._last_s.pop(rid, None)
        if (info := self._live.pop(rid, None)) is not None:
            self._records.append((_END, now_s, rid, info.request_class.value))

    def since(self, at_s: float) -> list[Record]:
        """Return the records from ``at_s`` on, as far back as they are kept. O(records kept)."""
        return [record for record in self._records if record[1] >= at_s]


def trace_events(records: Sequence[Record], process: int) -> Iterator[str]:
    """Yield the events of what ``StepTrace`` has kept, as those of a process of this number."""
    for kind, at_s, *rest in records:
        if kind == _STEP:
            yield _event(_slice(at_s, rest), process)
            continue
        rid, request_class, *more = rest
        event = {"name": rid, "ts": _us(at_s), "cat": request_class, "id": rid}
        if kind == _BEGIN:  # Of the request's span; one that has no end stays open.
            prompt_tokens, batch = more
            event |= {"ph": "b", "args": {"prompt_tokens": prompt_tokens, "batch": batch}}
        elif kind == _FIRST:
            event |= {"ph": "n", "name": "first_token"}
        else:
            event |= {"ph": "e"}
        yield _event(event, process)


def _slice(end_s: float, step: Sequence[Any]) -> dict[str, object]:
    """Return the event of a step; a second is a second of the trace."""
    start_s, name, first_layer, stopped_at, counts, (online, offline) = step
    args: dict[str, Any] = {"rows": {"online": counts[0], "offline": counts[1]}}
    if online:
        args["online"] = online
    if offline:
        args["offline"] = offline
    if first_layer or stopped_at is not None:
        args["layers"] = {"from": first_layer, "before": stopped_at}
    if first_layer:
        name += ", resumed"
    if stopped_at is not None:
        name += ", suspended"
    start = _us(start_s)
    return {"ph": "X", "name": name, "ts": start, "dur": _us(end_s) - start, "args": args}
