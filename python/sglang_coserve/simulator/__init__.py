"""A discrete-event simulator that drives the production scheduler.

- ``run``: one workload under one policy; ``options``: from a user's words to that.
- ``engine``: the event loop; ``pools``: two of them.
- ``executor``: plans carried out on counters; ``request``, ``decode_rows``, ``running_batch``:
  its state; ``prefix_cache``, ``kv_pool``, ``checkpoint``: where KV is.
- ``binding``, ``source``: requests from workloads; ``models``: shapes and memory.
- ``recorded_traffic``, ``what_if``: a recording of the engine, with something changed.
- ``result``, ``report``, ``plots``, ``event_log``, ``chrome_trace``: what comes out.

Everything that comes out is simulated, and says so.
"""

from sglang_coserve.simulator.chrome_trace import ChromeTrace
from sglang_coserve.simulator.compare import compare
from sglang_coserve.simulator.event_log import EventLog
from sglang_coserve.simulator.executor_config import (
    CheckpointConfig,
    ExecutorConfig,
    SafepointConfig,
)
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.plots import require_matplotlib
from sglang_coserve.simulator.report import table_text, write_report
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import Setup, Workload, simulate
from sglang_coserve.simulator.run_control import RunControl

__all__ = [
    "CheckpointConfig",
    "ChromeTrace",
    "EventLog",
    "ExecutorConfig",
    "RunControl",
    "SafepointConfig",
    "Setup",
    "SimulationOptions",
    "SimulationResult",
    "Workload",
    "compare",
    "require_matplotlib",
    "simulate",
    "table_text",
    "write_report",
]
