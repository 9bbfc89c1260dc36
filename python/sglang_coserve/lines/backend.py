"""The interface between the line engine and what serves lines, and what backends have in common."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, Self

import msgspec

from sglang_coserve.errors import ServerError
from sglang_coserve.jsonl.body_limits import BodyLimits

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Every endpoint that lines may have, where it is unknown which of them the model serves."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MovedKv:
    """Where an engine that gave a line back has left KV of it, for another one to go on with."""

    name: str
    tokens: int
    """Of prompt and output, from the first on."""


class LineMovedError(ServerError):
    """The engine gives the line back, or does not take it: it was asked to, drains, or has another
    model.

    The line goes on elsewhere, with the tokens that were received.
    """

    def __init__(self, message: str, kv: MovedKv | None = None) -> None:
        super().__init__(message)
        self.kv = kv
        """What the engine has left of it."""


class LineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt at one line of a batch. It goes over the wire as it is, but for the clock."""

    batch_id: str

    line: int
    """1-based line number in the input."""

    endpoint: str
    """The path of the OpenAI route that serves it, e.g. ``/v1/completions``."""

    body: dict[str, Any]
    """A copy for this attempt only, which the backend may change."""

    generated: tuple[int, ...] = ()
    """Token ids that an interrupted attempt had generated: continue after them."""

    deadline_s: float | None = None
    """When the batch should be complete, in seconds since the epoch; None for no deadline."""

    expected_output_tokens: int | None = None
    """Estimate from finished lines of the batch; None before there are any."""

    kv: MovedKv | None = None
    """What an engine has left of it that had it before; None if nothing is known."""

    due_in_s: float | None = None
    """On the wire, in place of ``deadline_s``: two machines may have different clocks."""

    model: str = ""
    """On the wire, what ``generated`` belongs to, and the answer is to be of."""

    attempt: str = ""
    """On the wire, names this attempt among all that an engine has."""

    def to_wire(self, model: str, now_s: float) -> Self:
        """Return it as it is sent: the time left in place of the deadline."""
        left_s = None if self.deadline_s is None else self.deadline_s - now_s
        return msgspec.structs.replace(self, deadline_s=None, due_in_s=left_s, model=model)

    def from_wire(self, now_s: float) -> Self:
        """Return what ``to_wire`` made with its deadline by this machine's clock."""
        due_s = None if self.due_in_s is None else now_s + self.due_in_s
        return msgspec.structs.replace(self, deadline_s=due_s, due_in_s=None)


class FailureKind(Enum):
    """How an attempt failed: whether the engine or the line is to blame."""

    UNREACHABLE = "unreachable"
    """The engine never received the line."""

    UNAVAILABLE = "unavailable"
    """The engine, or a proxy in front of it, accepts no work now."""

    LOST = "lost"
    """The connection broke while the engine had the line."""

    TIMED_OUT = "timed_out"
    """The engine had the line for longer than one attempt may take."""

    FAILED = "failed"
    """The engine tried this line and failed."""

    @classmethod
    def _missing_(cls, value: object) -> FailureKind:  # noqa: ARG003
        """Take what an engine of another version says in other words for a failure."""
        return cls.FAILED


@dataclass(frozen=True, slots=True)
class LineResult:
    """The outcome of a line, or of one attempt at it."""

    status_code: int
    """HTTP status of the OpenAI route; 4xx if the body is invalid, 0 without an answer."""

    request_id: str

    body: Any
    """The response, or an error object. Tokens are counted from its ``usage``."""

    is_retryable: bool = False
    """True if the line may succeed in another attempt."""

    kind: FailureKind = FailureKind.FAILED
    """The kind of failure, if it is retryable."""

    retry_after_s: float = 0.0
    """Least wait before the next attempt, as requested by the engine."""

    @classmethod
    def unserved(cls, code: str, message: str, kind: FailureKind | None = None) -> Self:
        """Return the result of a line without an answer; it is retryable if ``kind`` is given."""
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        is_retryable = kind is not None
        kind = kind or FailureKind.FAILED
        return cls(0, "", {"error": error}, is_retryable, kind)

    @classmethod
    def refused(cls, status: int, message: str, request_id: str = "") -> Self:
        """Return the answer to a line that cannot be served: now, or with a status of 4xx ever."""
        is_retryable = status >= 500
        kind = "server_error" if is_retryable else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": status}
        return cls(status, request_id, {"error": error}, is_retryable)

    @property
    def is_ok(self) -> bool:
        """True when the line was served."""
        return 200 <= self.status_code < 300 and not self.is_retryable


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """The load of the engine."""

    offline_tokens_per_s: float | None
    """Prompt and generated tokens of offline requests per second, a moving average over the time
    with offline work. Before there was any, the predicted rate; None if unknown."""

    is_online_busy: bool = False
    """True while the same event loop serves requests other than lines."""

    total_tokens: int = 0
    """Prompt and generated tokens of offline requests since the start."""

    max_in_flight: int | None = None
    """Most lines in flight that it can make use of; None for no limit of its own."""

    num_engines: int = 1
    """Engines that lines go to. Each has use for the bytes in flight that one server has."""


class LineBackend(Protocol):
    """Serves lines as offline requests: an engine in this process, or servers.

    A class that derives from it, or from ``Backend``, has a model that never changes, if it does
    not say otherwise.
    """

    @property
    def model(self) -> str:
        """Identifies what generates the tokens: weights, tokenizer, and numerical settings.

        It changes as soon as other weights are loaded. Journaled tokens are continued only by
        a backend with the same value.
        """

    @property
    def is_changing(self) -> bool:
        """True while weights are being updated: requests are aborted for that, none begin."""
        return False

    async def settled(self) -> None:
        """Wait while ``is_changing``."""
        return

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """Make one attempt at a line.

        ``on_tokens`` is called on the event loop with token ids as they are
        generated, those after ``request.generated`` only. A request that cannot be
        continued from its tokens (several choices, say) never calls it. Cancelling
        the call aborts the request in the engine; it may take until the end of a step, whose
        tokens are then reported, too.

        Raises:
            ServerError: no line can be served any more; this ends the run. Any other exception
                counts as an engine failure, after which the line is retried.
        """


class Backend(LineBackend, Protocol):
    """A ``LineBackend`` with what the Batch API needs in addition."""

    @property
    def endpoints(self) -> frozenset[str]:
        """The endpoints that this model can serve."""

    @property
    def limits(self) -> BodyLimits:
        """Limits of a line's body; larger ones are never passed to ``run``."""

    @property
    def stalled_by(self) -> str | None:
        """Why no line can be served now; None while lines are."""
        return None

    @property
    def model_names(self) -> tuple[str, ...]:
        """What lines may ask for: the model's name, then its adapters'; empty while unknown."""
        return ()

    def when_changing(self, take_out: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        """Register ``take_out``, to be called when an update would wait for lines in flight.

        Returns what unregisters it.
        """
        return lambda: None

    def hand_back(self, request: LineRequest) -> bool:  # noqa: ARG002
        """Ask that a line that is being run be handed back with its KV, within some seconds.

        ``run`` then raises ``LineMovedError``, after all tokens were reported, unless the line
        has ended before. False where that cannot be done: the call is to be cancelled instead.
        """
        return False

    def prompt_tokens(self, request: LineRequest) -> int | None:  # noqa: ARG002
        """Return how long the prompt of a line is that is being run and can be handed back.

        None if that is not known, as before its first tokens.
        """
        return None

    def load(self) -> BackendLoad:
        """Return the current load of the engine. Cheap; called often."""

    async def online_delays_s(self) -> Mapping[str, float] | None:
        """Return the seconds by which each batch has delayed online requests since the start.

        None if unknown. Batches without a delay, or without a recent one, are left out.
        """
        return None


class ChangeListeners:
    """Those who are told that a backend changes its model (``Backend.when_changing``)."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have ``listener`` called by ``tell``; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self) -> None:
        """Call each of them. Never raises: one that fails is logged, for the others and the
        exchange itself are to go on."""
        for listener in self._listeners.copy():
            try:
                listener()
            except Exception:
                _log.exception("lines in flight could not be told that the model changes")


_LEARNING_S: Final = 10.0
_TOGETHER_S: Final = 0.1
"""Tokens that come within it are remembered as one number, so that memory does not grow with the
rate: 2,000 lines a second took some 40 MiB."""


class TokenRate:
    """A moving mean over the last ``window_s``, to 0.1 s, in which anything was in flight.

    Time without work does not count, so the rate after a pause is that before it.
    ``clock`` is monotonic, in seconds. ``expected_per_s`` stands in for what is
    missing of the first ten seconds with work: a prompt counts only when its line ends.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        window_s: float = 60.0,
        expected_per_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._window_s = window_s
        self._expected_per_s = expected_per_s
        self._in_flight = 0
        self._last_s = clock()
        self._busy_s = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self.total_tokens = 0
        """Since the start."""

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count the time within it as time with work."""
        self._advance()
        self._in_flight += 1
        try:
            yield
        finally:
            self._advance()
            self._in_flight -= 1

    @property
    def num_in_flight(self) -> int:
        """How many are within ``in_flight``."""
        return self._in_flight

    def add(self, tokens: int) -> None:
        """Count tokens that work in flight took. O(1) amortised."""
        self._advance()
        since_s, together = self._recent[-1] if self._recent else (-math.inf, 0)
        if self._busy_s - since_s < _TOGETHER_S:
            self._recent[-1] = (since_s, together + tokens)
        else:
            self._recent.append((self._busy_s, tokens))
        self._tokens += tokens
        self.total_tokens += tokens

    def per_s(self) -> float | None:
        """Return the mean; before the first tokens what is expected, None if nothing is."""
        self._advance()
        observed_s = min(self._busy_s, self._window_s)
        if self._expected_per_s is None:
            return self._tokens / observed_s if self._tokens and observed_s else None
        # Work that gets nothing, because online requests take all, lowers it further and further.
        missing_s = max(_LEARNING_S - observed_s, 0.0 if self._tokens else 1.0)
        return (self._tokens + self._expected_per_s * missing_s) / (observed_s + missing_s)

    def _advance(self) -> None:
        now_s = self._clock()
        if self._in_flight:
            self._busy_s += now_s - self._last_s
        self._last_s = now_s
        while self._recent and self._recent[0][0] <= self._busy_s - self._window_s:
            self._tokens -= self._recent.popleft()[1]
