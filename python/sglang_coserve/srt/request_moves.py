"""The interface to what moves offline requests with their KV from one engine to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sglang_coserve.config import CoserveConfig
from sglang_coserve.config.coserve import Pool
from sglang_coserve.http_lines.engine_load import WantedLines
from sglang_coserve.lines.background import TaskSupervisor

if TYPE_CHECKING:
    from sglang_coserve.srt.admission.admission import Admission
    from sglang_coserve.srt.steps.engine_parts import EngineParts

Req = Any
ScheduleBatch = Any

COUNTED: Final = ("moved_out_tokens", "moved_in_tokens", "moves_without_kv")
"""Counts of moves, which only grow."""


class RequestMoves:
    """The moves of a scheduler that moves nothing: requests end where they are.

    Requests whose KV is on its way neither run nor wait. All ranks have the same ones, in the same
    order, and call each method at the same point of a round.
    """

    pool: Pool | None = None
    """What the engine is for a gateway with pools."""

    def __len__(self) -> int:
        return 0

    def figures(self) -> Mapping[str, int]:
        """Return what ``/coserve/status`` says of moved KV (docs/pools.md). O(1)."""
        return dict.fromkeys(COUNTED, 0)

    def wants(
        self,
        online: Sequence[Req],
        offline: Sequence[Req],
        *,
        free_kv_tokens: int,
        free_requests: int,
    ) -> WantedLines | None:
        """Return the running lines of other engines that this one would take over; None for none.

        ``online`` and ``offline`` are the requests with KV; there is room for the rest.
        """
        return None

    def kept(self) -> Iterable[Req]:
        """Return the requests whose KV is on its way."""
        return ()

    def ask(self, rids: Sequence[str], model: str) -> list[str]:
        """Let requests leave, with the KV of ``model``; return those that do.

        The KV of each is left under its rid.
        """
        return []

    def come(self, req: Req) -> bool:
        """Begin to fetch the KV that was left for a new request; False if there is none to wait
        for, or no room."""
        return False

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the requests that match: they are aborted."""
        return []

    def step(self, running_batch: ScheduleBatch) -> None:
        """Go on with the moves, before anything is admitted beside ``running_batch``."""

    def yield_to_threads(self) -> None:
        """Let threads run that move KV, when no batch does."""


class RequestMovesSetup:
    """Sets up the moves of an engine; this class sets up an engine that moves nothing.

    The methods are in the order of their calls. ``moves`` is called in the process of a scheduler.
    """

    def server_settings(self, config: CoserveConfig) -> dict[str, Any]:
        """Return the fields of SGLang's ``ServerArgs`` that moves need beside those of the
        store of KV."""
        return {}

    def check(self, config: CoserveConfig) -> None:
        """Refuse settings with which nothing can be moved.

        Raises:
            StartupError: what KV is moved through cannot be used.
        """

    def let_leave(
        self, config: CoserveConfig, tokenizer_manager: Any
    ) -> Callable[[Any], None] | None:
        """Return what lets the request of a ``LineManager`` leave with its KV; None if none does.

        A request that cannot leave any more is aborted.
        """
        return None

    def moves(
        self,
        parts: EngineParts,
        admission: Admission,
        background: TaskSupervisor,
        forget: Callable[[Req], None],
    ) -> RequestMoves:
        """Return the moves of a scheduler.

        ``background`` runs threads; ``forget`` is called with requests that have left.

        Raises:
            UnsupportedError: KV of the model cannot be moved.
        """
        return RequestMoves()
