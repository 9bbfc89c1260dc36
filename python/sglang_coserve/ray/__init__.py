"""Ray Data jobs on many engines: a dataset of requests in, one of results out.

::

    requests = read_requests("/shared/requests", checkpoint="/shared/progress")
    results = complete(requests, engines=["http://gpu-1:30001", "http://gpu-2:30001"])
    results.write_parquet("/shared/results")

Each actor of the job is to the engines what a gateway is (``fleet``), without its files: Ray
keeps the lines, and which of them are done. Neither torch nor SGLang is needed.
"""

from sglang_coserve.errors import require

require("ray", "sglang_coserve.ray")

from sglang_coserve.fleet.discovery import DnsName  # noqa: E402
from sglang_coserve.ray.completion import complete, read_requests  # noqa: E402

__all__ = ["DnsName", "complete", "read_requests"]
