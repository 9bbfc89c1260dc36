"""A discrete-event simulator that drives the production scheduler.

- ``run``: one workload under one policy; ``options``: the settings of a user.
- ``engine``: the event loop; ``pools``: two engines.
- ``executor``: carries out plans on counters; ``request``, ``decoding_requests``,
  ``running_step``: its state; ``prefix_cache``, ``kv_pool``, ``checkpoint``, ``host_loads``: the
  location of KV.
- ``binding``, ``source``: requests from workloads; ``models``: shapes and memory.
- ``find_budget``: the largest step budget that meets the SLOs.
- ``recorded_traffic``: a recording of the engine, as traces.
- ``result``, ``report``, ``plots``, ``event_log``: output.

All output is marked as simulated.
"""

from sglang_coserve.simulator.compare import EventLog, compare
from sglang_coserve.simulator.executor_config import (
    CheckpointConfig,
    ExecutorConfig,
    SafepointConfig,
)
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.report import table_text, write_report
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate

__all__ = [
    "CheckpointConfig",
    "EventLog",
    "ExecutorConfig",
    "RunControl",
    "SafepointConfig",
    "SimulationOptions",
    "SimulationResult",
    "SimulationSetup",
    "Workload",
    "compare",
    "simulate",
    "table_text",
    "write_report",
]
