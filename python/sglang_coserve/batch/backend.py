"""What the Batch API needs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_coserve.jsonl.body_limits import BodyLimits

__all__ = ["Backend", "BackendLoad", "LineRequest", "LineResult"]


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line of a batch, ready for the engine."""

    batch_id: str

    line: int
    """1-based line number in the input."""

    endpoint: str
    """The path of the OpenAI route that would serve it, ``/v1/completions`` say."""

    body: Mapping[str, Any]

    generated: tuple[int, ...]
    """Token ids that an interrupted attempt had generated: continue after them."""

    deadline_s: float
    """When the batch should be complete, in seconds since the epoch."""

    expected_output_tokens: int | None = None
    """What finished lines of the batch lead to expect; None before there are any."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """The engine's answer to one line."""

    status_code: int
    """As the OpenAI route would answer; 4xx when the body is invalid."""

    request_id: str

    body: Mapping[str, Any]
    """The response, or an OpenAI error object. Its ``usage`` is what is counted."""

    is_retryable: bool = False
    """True when the engine failed and the line may succeed another time."""


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


class Backend(Protocol):
    """An engine that serves the lines of batches in its offline class."""

    @property
    def model(self) -> str:
        """What the generated tokens belong to: weights, tokenizer, and how they are computed.

        Another name from the moment at which other weights are loaded. Journaled tokens
        are given back only to a backend of the same name.
        """

    @property
    def endpoints(self) -> frozenset[str]:
        """The endpoints that this model can serve."""

    @property
    def limits(self) -> BodyLimits:
        """What one line may be. ``run`` gets none that is more."""

    @property
    def is_changing(self) -> bool:
        """True while the model is being exchanged: requests are aborted for that, none begin."""

    def when_changing(self, take_out: Callable[[], None]) -> None:
        """Have ``take_out`` called when an exchange would wait for the lines in flight."""

    async def settled(self) -> None:
        """Wait while ``is_changing``."""

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """Serve one line to its end.

        ``on_tokens`` is called on the event loop with token ids as they are
        generated, those after ``request.generated`` only. A request that cannot be
        continued from its tokens (several choices, say) never calls it. Cancelling
        the call aborts the request in the engine. An exception is taken as an
        engine failure: the line is tried again.
        """

    def load(self) -> BackendLoad:
        """Return how busy the engine is now. Cheap; called often."""
