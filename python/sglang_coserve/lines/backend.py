"""The interface between the line engine and what serves lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, Self

from sglang_coserve.errors import ServerError
from sglang_coserve.jsonl.body_limits import BodyLimits

__all__ = [
    "Backend",
    "BackendLoad",
    "ChangeListeners",
    "FailureKind",
    "LineBackend",
    "LineHandedBackError",
    "LineRequest",
    "LineResult",
    "MovedKv",
]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MovedKv:
    """Where an engine that gave a line back has left KV of it, for another one to go on with."""

    name: str
    tokens: int
    """Of prompt and output, from the first on."""


class LineHandedBackError(ServerError):
    """A line that was to be handed back was, with its tokens."""

    def __init__(self, kv: MovedKv | None) -> None:
        super().__init__("the line was handed back")
        self.kv = kv


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line of a batch, ready for the engine."""

    batch_id: str

    line: int
    """1-based line number in the input."""

    endpoint: str
    """The path of the OpenAI route that serves it, e.g. ``/v1/completions``."""

    body: dict[str, Any]
    """A copy for this attempt only, which the backend may change."""

    generated: tuple[int, ...]
    """Token ids that an interrupted attempt had generated: continue after them."""

    deadline_s: float
    """When the batch should be complete, in seconds since the epoch; infinity for no deadline."""

    expected_output_tokens: int | None = None
    """Estimate from finished lines of the batch; None before there are any."""

    kv: MovedKv | None = None
    """What an engine has left of it that had it before; None if nothing is known."""


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

        ``run`` then raises ``LineHandedBackError``, after all tokens were reported, unless the line
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

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._listeners)

    def tell(self) -> None:
        """Call each of them. Never raises: one that fails is logged, for the others and the
        exchange itself are to go on."""
        for listener in self._listeners.copy():
            try:
                listener()
            except Exception:
                _log.exception("lines in flight could not be told that the model changes")
