"""The state of requests in the modelled executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_coserve.core.offline_queue import PackedTokens, pack_tokens
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.prefix_tree import Node
from sglang_coserve.core.request import LEGAL_TRANSITIONS, RequestState
from sglang_coserve.core.snapshot import Request, RequestInfo
from sglang_coserve.metrics import Outcome, RequestTimeline


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request, its progress and its memory; changed only by the executor.

    It ends after ``output_tokens``. ``view`` is the request as snapshots have it, created anew only
    when something in it changes.
    """

    info: RequestInfo
    output_tokens: int
    _make_prompt: Callable[[], PackedTokens]
    """Returns its packed prompt; called when that is first needed."""

    _serial: int
    """Makes its output differ from that of other requests."""

    expected_output_tokens: int | None = None
    """Output tokens that its sender expects; None if unknown."""

    _tokens: PackedTokens | None = None
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    """Tokens with KV on the device."""

    lock: Node | None = None
    """End of its prefix in the cache; KV computed after it is private."""

    shared_tokens: int = 0
    """Leading computed tokens that other requests use, too."""

    saved_tokens: int = 0
    """Leading tokens with a copy in host memory, in whole pages."""

    loaded_to_tokens: int = 0
    """Where the last load ended of those since it waits; 0 without one."""

    loaded_tokens: int = 0
    """Tokens that these loads have brought to the device."""

    token_times_s: list[float] = field(default_factory=list)
    """When each of its output tokens came out."""

    cached_prompt_tokens: int = 0
    """Prompt tokens found in the prefix cache at its first admission."""

    # Accounting of its tokens; see ``worked_tokens``.
    prefilled_tokens: int = 0
    """Tokens computed in chunks."""

    num_prefills: int = 0
    """Completed prefills, each of which produced an output token."""

    num_admissions: int = 0
    given_tokens: int = 0
    """Tokens found in the prefix cache, over all admissions."""

    reloaded_tokens: int = 0
    """Tokens copied back from host memory, over all admissions."""

    lost_tokens: int = 0
    """Computed tokens released, over all retractions and drops."""

    recomputed_tokens: int = 0
    """Those of ``worked_tokens`` whose KV had been computed before."""

    computed_ever_tokens: int = 0
    """Most computed tokens that it held before it lost them."""

    match_version: int = -1
    """Version of the prefix cache at which ``view.cached_tokens`` was looked up."""

    view: Request = field(init=False)

    def __post_init__(self) -> None:
        info = self.info
        assert 0 < self.output_tokens <= info.max_new_tokens, f"{info.rid}: {self.output_tokens}"
        assert info.prompt_tokens > 0, f"{info.rid}: no prompt"
        self.view = Request(info, self.state, 0, 0)

    @property
    def has_prompt(self) -> bool:
        """True when its prompt is computed, so that it decodes in either lane."""
        return self.state in (RequestState.DECODING, RequestState.PAUSED)

    @property
    def tokens(self) -> PackedTokens:
        """Its prompt, and the output that it had when it was last retracted, packed."""
        if self._tokens is None:
            self._tokens = self._make_prompt()
        return self._tokens

    @property
    def prompt(self) -> PackedTokens:
        """Its prompt, packed."""
        return PackedTokens(self.tokens[: self.info.prompt_tokens * TOKEN_BYTES])

    @property
    def generated_tokens(self) -> int:
        """Its output tokens so far."""
        return len(self.token_times_s)

    @property
    def length_tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.info.prompt_tokens + self.generated_tokens

    @property
    def locked_tokens(self) -> int:
        """Computed tokens that the prefix cache holds for it."""
        return 0 if self.lock is None else self.lock.depth_tokens

    @property
    def worked_tokens(self) -> int:
        """Tokens that steps computed for it.

        Conservation: computed = worked + given + reloaded − lost.
        """
        return self.prefilled_tokens + self.generated_tokens - self.num_prefills

    @property
    def is_complete(self) -> bool:
        """True when it has all its output tokens."""
        return self.generated_tokens == self.output_tokens

    def arrive_at(self, now_s: float) -> None:
        """Change its arrival time, before it has arrived."""
        self.info = self.info._replace(arrival_s=now_s)
        self.refresh_view()

    def move(self, state: RequestState) -> None:
        """Enter a state; the transition must be legal."""
        if state is not self.state:
            now = self.state
            assert state in LEGAL_TRANSITIONS[now], f"illegal: {now.name} -> {state.name}"
            self.state = state
        if state.is_final:
            self._tokens = None

    def know_output(self) -> None:
        """Make ``tokens`` include the output generated so far."""
        # An odd factor, so that the ids of two requests differ at equal positions.
        first_id = self._serial * 0x9E3779B1
        output = pack_tokens((first_id + i) % 2**32 for i in range(self.generated_tokens))
        self._tokens = PackedTokens(self.prompt + output)

    def refresh_view(self, cached_tokens: int = 0) -> None:
        """Update ``view`` to the current state; ``cached_tokens`` is for waiting requests."""
        times = self.token_times_s
        self.view = Request(
            self.info,
            self.state,
            self.generated_tokens,
            self.computed_tokens,
            self.shared_tokens if self.computed_tokens else cached_tokens,
            times[-1] if times else None,
            times[0] if times else None,
        )

    def timeline(self) -> RequestTimeline:
        """Return the timeline from which metrics are computed."""
        outcome = {
            RequestState.FINISHED: Outcome.FINISHED,
            RequestState.ABORTED: Outcome.FAILED,
        }.get(self.state, Outcome.UNFINISHED)
        return RequestTimeline(
            self.info.rid,
            self.info.arrival_s,
            tuple(self.token_times_s),
            self.info.prompt_tokens,
            self.cached_prompt_tokens,
            outcome,
        )
