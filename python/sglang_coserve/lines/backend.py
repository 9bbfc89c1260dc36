"""What the line engine needs of whatever serves lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, Self

from sglang_coserve.jsonl.body_limits import BodyLimits

__all__ = ["Backend", "BackendLoad", "FailureKind", "LineBackend", "LineRequest", "LineResult"]


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line of a batch, ready for the engine."""

    batch_id: str

    line: int
    """1-based line number in the input."""

    endpoint: str
    """The path of the OpenAI route that would serve it, ``/v1/completions`` say."""

    body: dict[str, Any]
    """Of this attempt alone: the backend may change it."""

    generated: tuple[int, ...]
    """Token ids that an interrupted attempt had generated: continue after them."""

    deadline_s: float
    """When the batch should be complete, in seconds since the epoch; infinity for no time."""

    expected_output_tokens: int | None = None
    """What finished lines of the batch lead to expect; None before there are any."""


class FailureKind(Enum):
    """How an attempt failed, by what it says about the engine and about the line."""

    UNREACHABLE = "unreachable"
    """The engine never had the line: says nothing about the line."""

    UNAVAILABLE = "unavailable"
    """The engine, or a proxy before it, takes no work now."""

    LOST = "lost"
    """The connection broke while the engine had the line."""

    TIMED_OUT = "timed_out"
    """The engine had the line for longer than one attempt may take."""

    FAILED = "failed"
    """The engine tried this line and failed."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of one line, or of one attempt at it."""

    status_code: int
    """As the OpenAI route would answer; 4xx when the body is invalid. 0 without an answer."""

    request_id: str

    body: Any
    """The response, or an error object. Its ``usage`` is what is counted."""

    is_retryable: bool = False
    """True when the line may succeed another time."""

    kind: FailureKind = FailureKind.FAILED
    """Why, when it is retryable."""

    retry_after_s: float = 0.0
    """How long the engine asked to be left alone."""

    @classmethod
    def unserved(
        cls,
        code: str,
        message: str,
        kind: FailureKind | None = None,
        retry_after_s: float = 0.0,
    ) -> Self:
        """Return the result of a line without an answer; ``kind`` says why, if it may pass."""
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        is_retryable = kind is not None
        kind = kind or FailureKind.FAILED
        return cls(0, "", {"error": error}, is_retryable, kind, retry_after_s)

    @property
    def is_ok(self) -> bool:
        """True when the line was served."""
        return 200 <= self.status_code < 300 and not self.is_retryable


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """How busy the engine is with offline work."""

    offline_tokens_per_s: float | None
    """Prompt and generated tokens of offline requests, a moving mean over the time with
    work. Before there was any, what the engine is expected to reach; None if unknown."""

    is_online_busy: bool = False
    """True while requests other than lines are being served, with the same event loop."""

    total_tokens: int = 0
    """Prompt and generated tokens of offline requests since the start."""

    busy_s: float = 0.0
    """The time since the start in which there were any."""

    max_in_flight: int | None = None
    """Lines that it has use for at a time; None: as many as there may be."""


class LineBackend(Protocol):
    """What serves lines in the offline class: an engine in this process, or servers."""

    @property
    def model(self) -> str:
        """What the generated tokens belong to: weights, tokenizer, and how they are computed.

        Another name from the moment at which other weights are loaded. Journaled tokens
        are given back only to a backend of the same name.
        """

    @property
    def is_changing(self) -> bool:
        """True while the model is being exchanged: requests are aborted for that, none begin."""

    async def settled(self) -> None:
        """Wait while ``is_changing``."""

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """Make one attempt at a line.

        ``on_tokens`` is called on the event loop with token ids as they are
        generated, those after ``request.generated`` only. A request that cannot be
        continued from its tokens (several choices, say) never calls it. Cancelling
        the call aborts the request in the engine.

        Raises:
            ServerError: no line can be served any more; it ends the run. Any other exception
                is taken as an engine failure: the line is tried again.
        """


class Backend(LineBackend, Protocol):
    """What the Batch API needs beside that."""

    @property
    def endpoints(self) -> frozenset[str]:
        """The endpoints that this model can serve."""

    @property
    def limits(self) -> BodyLimits:
        """What one line may be. ``run`` gets none that is more."""

    def when_changing(self, take_out: Callable[[], None]) -> None:
        """Have ``take_out`` called when an exchange would wait for the lines in flight."""

    def load(self) -> BackendLoad:
        """Return how busy the engine is now. Cheap; called often."""

    async def online_delays_s(self) -> Mapping[str, float] | None:
        """Return by how many seconds each batch has delayed online requests since the start.

        None where that is not known. A batch that delayed none, or for long none, is left out.
        """
