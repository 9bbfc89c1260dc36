"""The engine behind the Batch API: SGLang, in the process of its HTTP server."""

from sglang_coserve.srt.batch_backend.backend import BatchBackend

__all__ = ["BatchBackend"]
