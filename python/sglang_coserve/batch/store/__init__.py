"""Files, batches and events in SQLite.

- ``database`` opens the file, checks it, brings its schema up to date, and runs transactions in the
  one thread that owns the connection.
- ``file_rows`` and ``batch_rows`` are the transactions' parts.

There is no row per line: which lines are finished is in the result files themselves.
"""

from sglang_coserve.batch.store.database import Store

__all__ = ["Store"]
