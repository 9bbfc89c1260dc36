"""HyGen's budget search: simulated with a measured profile, then validated on the engine (§4.2).

- ``options``: what a user says; ``session``: the whole of it; ``report``: what comes out.
- ``machine``: the engine that is modelled; ``load``: what it serves; ``measurement``: one run.
- ``simulated``: runs on the simulator; ``search``: the largest budget that meets all SLOs there.
- ``live``: runs on a server of our own; ``validation``: smaller budgets until they meet them too.
- ``offline_file``, ``server_flags``: the same load and settings for that server.
"""

from sglang_coserve.slo_search.options import SearchOptions, ValidationOptions
from sglang_coserve.slo_search.progress import SearchProgress
from sglang_coserve.slo_search.report import report_text, report_to_dict
from sglang_coserve.slo_search.session import Session

__all__ = [
    "SearchOptions",
    "SearchProgress",
    "Session",
    "ValidationOptions",
    "report_text",
    "report_to_dict",
]
