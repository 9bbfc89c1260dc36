"""Runs one workload under several policies."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from sglang_coserve.core.policies import make_policy
from sglang_coserve.simulator.observer import EventLog, RunControl, SimulationObserver
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import simulate


def compare(
    options: SimulationOptions,
    directory: Path,
    control: RunControl,
    *,
    event_log: bool = False,
) -> list[SimulationResult]:
    """Run every policy of ``options``; event logs go to files in ``directory``.

    Returns:
        The results in the order of the policies, of which the last may be incomplete;
        empty if there was no time for any.

    Raises:
        CoserveError: an option or a file cannot be used.
        OSError: the directory cannot be written.
    """
    runs = [
        (make_policy(name, options.policy_settings(name)), options.setup(name))
        for name in options.policies
    ]
    workload = options.workload()
    directory.mkdir(parents=True, exist_ok=True)
    results: list[SimulationResult] = []
    for policy, setup in runs:
        if control.should_stop:
            break
        control.begin(policy.name, workload.interval_s)
        with ExitStack() as files:
            observers: list[SimulationObserver] = []
            if event_log:
                log = files.enter_context((directory / f"events-{policy.name}.jsonl").open("w"))
                observers.append(
                    EventLog(log, {"policy": policy.name, "settings": options.to_dict()})
                )
            results.append(
                simulate(workload, setup, policy, observers=observers, on_progress=control.tick)
            )
    return results
