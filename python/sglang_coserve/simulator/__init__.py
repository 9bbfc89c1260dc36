"""A discrete-event simulator that drives the production scheduler.

- ``run``: one workload under one policy; ``options``: the settings of a user.
- ``engine``: the event loop of one; ``fleet``: many of them.
- ``executor``: carries out plans on counters; ``request``, ``running_step``: its state;
  ``prefix_cache``, ``request_kv``, ``host_kv``: the location of KV.
- ``binding``, ``assemble``: requests and machines, from workloads and names.
- ``find_budget``: the largest step budget that meets the SLOs.
- ``recorded_traffic``: a recording of the engine, as traces.
- ``compare``, ``result``, ``report``, ``plots``: output.

All output is marked as simulated.
"""

from sglang_coserve.simulator.compare import EventLog, compare
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.report import table_text, write_report
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate

__all__ = [
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
