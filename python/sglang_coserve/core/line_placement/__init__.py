"""Which engine of a fleet gets which line of a batch, and when. Sans I/O, as all of the core.

Lines whose prompts begin alike go to one engine, as far as its window allows: there the
prefix is computed once. Which engine that is follows from the prefix alone (rendezvous
hashing), so another gateway, or the same one after a restart, finds the same.
"""

from sglang_coserve.core.line_placement.engines import (
    FAILURES_IN_A_ROW,
    LINES_AHEAD,
    FailureStreak,
    Rendezvous,
    line_window,
    model_of_most,
)
from sglang_coserve.core.line_placement.placement import (
    DEATHS_BEFORE_ALONE,
    LinePlacement,
    Placed,
    PrefixGroups,
)
from sglang_coserve.core.line_placement.pools import LinePools, Move

__all__ = [
    "DEATHS_BEFORE_ALONE",
    "FAILURES_IN_A_ROW",
    "LINES_AHEAD",
    "FailureStreak",
    "LinePlacement",
    "LinePools",
    "Move",
    "Placed",
    "PrefixGroups",
    "Rendezvous",
    "line_window",
    "model_of_most",
]
