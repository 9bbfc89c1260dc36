"""Ray Data jobs on many engines: a dataset of requests in, one of results out.

::

    requests = read_requests("/shared/requests", checkpoint="/shared/progress")
    results = complete(requests, engines=["http://gpu-1:30001", "http://gpu-2:30001"])
    results.write_parquet("/shared/results")

Each actor of the job is to the engines what a gateway is (``fleet``), without its files: Ray
keeps the lines, and which of them are done. Neither torch nor SGLang is needed.
"""

from sglang_coserve.fleet.discovery import DnsName, Router

try:
    from sglang_coserve.ray.completion import complete
    from sglang_coserve.ray.request_files import read_requests
except ModuleNotFoundError as error:
    if error.name not in ("ray", "pyarrow"):
        raise
    message = f"sglang_coserve.ray needs {error.name}: pip install 'ray[data]'"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["DnsName", "Router", "complete", "read_requests"]
