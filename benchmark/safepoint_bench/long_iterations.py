"""An engine whose offline steps are as long as its prompts.

On a CPU the plan finds small chunks best, since there is little to gain from large
ones. What safepoints do for an arrival in a long step shows only in one.
"""

from __future__ import annotations

from typing import Any

from sglang_coserve.srt import processes
from sglang_coserve.srt.engine import CoserveEngine

__all__ = ["LongIterationsEngine"]


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run the scheduler's process, in which every offline prefill gets all tokens there are."""
    from sglang_coserve.core.planning import offline_phase

    vars(offline_phase)["efficient_tokens"] = lambda batch: batch.free_tokens
    processes.run_scheduler_process(*args, **kwargs)


class LongIterationsEngine(CoserveEngine):
    """See the module's docstring."""

    run_scheduler_process_func = staticmethod(run_scheduler_process)
