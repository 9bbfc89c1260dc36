"""HyGen's budget search: simulated with a measured profile, then validated on the engine (§4.2).

- ``options``: the settings; ``session``: a whole search; ``report``: its output.
- ``machine``: the modelled engine; ``load``: the requests; ``measurement``: the result of a run.
- ``simulated``: runs on the simulator; ``search``: the largest budget that meets all SLOs there.
- ``live``: runs on a real server; ``validation``: lowers the budget until it meets them there, too.
- ``offline_file``, ``server_flags``: the same load and settings for that server.
"""

from sglang_coserve.slo_search.options import SearchOptions, ValidationOptions
from sglang_coserve.slo_search.progress import SearchProgress
from sglang_coserve.slo_search.report import report_text, report_to_dict
from sglang_coserve.slo_search.session import SearchSession

__all__ = [
    "SearchOptions",
    "SearchProgress",
    "SearchSession",
    "ValidationOptions",
    "report_text",
    "report_to_dict",
]
