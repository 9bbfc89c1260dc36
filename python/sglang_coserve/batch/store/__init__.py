"""Files, batches and events in SQLite.

- ``database`` opens the file, checks it, and runs transactions in the one thread that owns the
  connection. Lists are read in another thread.
- ``records`` makes JSON of a record, which is a row, and a record of JSON.
- ``pages`` has what lists of files and of batches share.
- ``file_rows`` and ``batch_rows`` are the transactions' parts. No other file has SQL.

There is no row per line: which lines are finished is in the result files themselves.
"""

from sglang_coserve.batch.store.database import Store
from sglang_coserve.batch.store.pages import MOST_ROWS

__all__ = ["MOST_ROWS", "Store"]
