"""Workloads: recorded and synthetic arrivals, their lengths, and prompts to match.

Read or synthesize requests, shape them to the machine, then make prompts::

    requests = window(read_trace("trace.csv"), 0, 600)
    requests, report = fit_to_context(scale_rate(requests, 2.0), max_context_tokens=8192)
"""

from sglang_coserve.workload.samples import sample_path
from sglang_coserve.workload.shape import (
    RESERVED_TOKENS,
    ContextFit,
    fit_to_context,
    scale_rate,
    thin,
    window,
)
from sglang_coserve.workload.synthetic import (
    FIRST_TEXT_TOKEN_ID,
    gamma_arrivals,
    poisson_arrivals,
    prompt_token_ids,
    synthesize,
)
from sglang_coserve.workload.trace import (
    BLOCK_TOKENS,
    TraceRequest,
    detect_format,
    read_trace,
)

__all__ = [
    "BLOCK_TOKENS",
    "FIRST_TEXT_TOKEN_ID",
    "RESERVED_TOKENS",
    "ContextFit",
    "TraceRequest",
    "detect_format",
    "fit_to_context",
    "gamma_arrivals",
    "poisson_arrivals",
    "prompt_token_ids",
    "read_trace",
    "sample_path",
    "scale_rate",
    "synthesize",
    "thin",
    "window",
]
