"""A strict engine of a fleet with pools: what it takes over, and what it gives back."""

from __future__ import annotations

from sglang_coserve.core.engine_load import WantedLines, wanted_lines
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.fleet import FleetEngine
from sglang_coserve.simulator.mailbox import Mailbox
from sglang_coserve.simulator.request import SimRequest

__all__ = ["strict_engine"]


def strict_engine(
    scheduler: Scheduler, executor: SimulatedExecutor, mailbox: Mailbox
) -> FleetEngine:
    """Return an engine that says which lines it wants, as ``/coserve/load`` of a real one does.

    A line that it retracts goes back at once, and is computed again; a real one leaves its KV.
    """

    def take_back(request: SimRequest) -> None:
        if request.info.is_online:
            executor.submit(request)
        else:
            engine.forget(request)
            mailbox.returned.append(request)

    def wants() -> WantedLines | None:
        running = executor.admitted.values()
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for request in running:
            lengths[request.info.is_online].append(request.computed_tokens)
        allowance = scheduler.interference.allowance
        return wanted_lines(
            scheduler.model,
            lengths[True],
            lengths[False],
            tpot_s=allowance.targets.tpot_s,
            gap_share=allowance.gap_share,
            free_kv_tokens=executor.pool.free_pages * executor.pool.page_tokens,
            free_requests=executor.config.max_running_requests - len(running),
            runs_all=not executor.offline_waiting,
        )

    engine = SimEngine(scheduler, executor, mailbox, [mailbox], take_back)
    return FleetEngine(engine, executor, mailbox, "strict", wants)
