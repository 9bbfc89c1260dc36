"""The offline client: turns a file of requests into a file of results, across interruptions.

``CoserveClient`` and its asyncio twin ``AsyncCoserveClient`` read and write OpenAI's
batch formats and have every line served in the offline class: as a batch of the server's, or
as one that the client keeps itself. They continue where an earlier run stopped.
``coserve submit`` is the same thing from a shell.
"""

from sglang_coserve.client.async_client import AsyncCoserveClient
from sglang_coserve.client.batch_api import Batch, BatchApi
from sglang_coserve.client.job import AsyncJob
from sglang_coserve.client.options import BatchOptions, ClientOptions
from sglang_coserve.client.output_files import BatchResult, LineError, Response, read_results
from sglang_coserve.client.progress import JobState, JobStatus
from sglang_coserve.client.sync_client import CoserveClient, Job
from sglang_coserve.lines.serve_line import RetryPolicy

__all__ = [
    "AsyncCoserveClient",
    "AsyncJob",
    "Batch",
    "BatchApi",
    "BatchOptions",
    "BatchResult",
    "ClientOptions",
    "CoserveClient",
    "Job",
    "JobState",
    "JobStatus",
    "LineError",
    "Response",
    "RetryPolicy",
    "read_results",
]
