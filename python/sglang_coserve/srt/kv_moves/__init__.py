"""Moved KV: requests go from one engine to another together with their KV (docs/pools.md).

``srt.optional_parts`` alone imports this package: ``setup`` sets it up in an engine.
``line_departures`` asks for requests to leave, and ``file_moves`` lets them leave and come.
``kv_files`` writes and reads their host pages in threads, and ``kv_directory`` is where the files
are. The scheduler's radix cache must be one with host pages that can be lent (``expect``,
``arrived``, ``saved_slots``, ``copy_to_host``): for now, ``kv_checkpoint.cache``.
"""
