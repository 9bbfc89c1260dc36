"""Moved KV: requests go from one engine to another together with their KV.

``request_moves`` lets requests leave and come, ``kv_files`` writes and reads their host pages in
threads, and ``kv_directory`` is where the files are. The scheduler's radix cache must be one with
host pages that can be lent (``expect``, ``arrived``, ``saved_slots``, ``copy_to_host``): for now,
``kv_checkpoint.cache``. Importing this package imports no other module.
"""
