"""The last steps of a scheduler, for Perfetto: what ran when, up to which layer, and who was in it.

What passes is noted in a few microseconds, and taken in many steps at a time. Right after a forward
pass the processor's caches hold something else: looking at the requests of a step then takes 41 µs
of CPU time, and 18 µs, the note among them, where 32 steps are looked at together (32 requests on
an AMD EPYC; tag ``measurements-1``).

The scheduler keeps plain values; whoever asks for them makes the events, in the Trace Event Format:
slices for what ran, and a span for each request with marks in it. Each event is a line of JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic_core import to_json

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.forward_kind import ForwardKind, prefilled
from sglang_coserve.srt.steps.offline_lane import OfflineLane
from sglang_coserve.srt.steps.request_ledger import RequestLedger

Req = Any
ScheduleBatch = Any


class Begun(NamedTuple):
    """A request in its first batch."""

    info: RequestInfo
    cached_tokens: int
    """Tokens of its prompt that the prefix cache had."""


class Launched(NamedTuple):
    """A batch is about to run."""

    at_s: float
    first_layer: int
    """0 unless it goes on after a suspension."""

    begun: Sequence[Begun]

    @classmethod
    def of(
        cls, batch: ScheduleBatch, now_s: float, lane: OfflineLane, ledger: RequestLedger
    ) -> Launched:
        """Return the note of a batch; to be called before the ledger's ``launched``. O(prompts)."""
        held = lane.suspended
        first_layer = held.layer if held is not None and held.batch is batch else 0
        begun: list[Begun] = []
        if batch.forward_mode.is_extend():
            # Requests that decode beside prompts have begun.
            for req, cached_tokens in zip(prefilled(batch), batch.prefix_lens, strict=False):
                rid = req.rid
                if rid in ledger and not ledger.has_begun(rid):
                    begun.append(Begun(ledger[rid].info, cached_tokens))
        return cls(now_s, first_layer, begun)


class Ended(NamedTuple):
    """The batch that was launched first has its results, or was suspended."""

    at_s: float
    reqs: Sequence[Req]
    kind: ForwardKind | None
    """What they did."""

    has_token: Sequence[bool] = ()
    """Which requests got a token; none where it was suspended."""

    stopped_at: int | None = None
    """The first layer that has not run; None: it ended."""


class Forgotten(NamedTuple):
    """A request has ended."""

    at_s: float
    rid: str


Note: TypeAlias = Launched | Ended | Forgotten


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

    def __init__(self) -> None:
        """Begin without steps."""
        self._records: deque[Record] = deque(maxlen=_MOST_RECORDS)
        self._launched: deque[tuple[float, int]] = deque(maxlen=_MOST_UNDER_WAY)
        self._ended_s = 0.0
        self._spans: dict[str, str] = {}
        """Requests that have begun, and have not ended: their class."""

        self._without_token: set[str] = set()
        """Of them, those that have no token yet."""

    def take(self, notes: Iterable[Note]) -> None:
        """Take in what has passed, in this order. O(requests) a step."""
        for note in notes:
            if isinstance(note, Ended):
                self._take_end(note)
            elif isinstance(note, Launched):
                self._take_launch(note)
            else:
                self._take_leave(note)

    def _take_launch(self, note: Launched) -> None:
        self._launched.append((note.at_s, note.first_layer))
        for info, _ in note.begun:
            kind = self._spans[info.rid] = info.request_class.value
            self._without_token.add(info.rid)
            self._records.append(
                (_BEGIN, info.arrival_s, info.rid, kind, info.prompt_tokens, info.job)
            )

    def _take_end(self, note: Ended) -> None:
        if not self._launched:
            return
        now_s, reqs, kind, has_token, stopped_at = note
        launched_s, first_layer = self._launched.popleft()
        start_s = max(launched_s, self._ended_s)
        self._ended_s = now_s
        spans = self._spans
        rids = [req.rid for req in reqs]
        offline = [rid for rid in rids if spans.get(rid) == "offline"]
        num_offline = len(offline)
        online = rids if not offline else [rid for rid in rids if spans.get(rid) != "offline"]
        name = "other" if kind is None else kind.value
        counts = len(rids) - num_offline, num_offline
        names = online[:_MOST_NAMES], offline[:_MOST_NAMES]
        self._records.append((_STEP, now_s, start_s, name, first_layer, stopped_at, counts, names))
        if self._without_token:
            for rid, has in zip(rids, has_token, strict=False):
                if has and rid in self._without_token:
                    self._without_token.discard(rid)
                    self._records.append((_FIRST, now_s, rid, spans[rid]))

    def _take_leave(self, note: Forgotten) -> None:
        now_s, rid = note
        kind = self._spans.pop(rid, None)
        self._without_token.discard(rid)
        if kind is not None:
            self._records.append((_END, now_s, rid, kind))

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
