"""The durable line engine: every line of a file gets exactly one record, also across crashes.

The server's Batch API (``batch``) and the client that sends lines one by one (``client``)
both use it. It depends neither on databases nor on HTTP nor on an engine: a ``Backend`` serves
lines.

- ``line_run`` serves the unfinished lines of one job and writes their records.
- ``line_source``, ``prefix_order`` choose the next line of a job, ``fair_slots`` the next job.
- ``serve_line``, ``retry`` serve one line, with retries; ``journal`` keeps its tokens so far.
- ``result_log``, ``result_writer``, ``result_record``: the files of records; ``progress``
  counts their contents.
- ``engine_lines``: the lines in the engine, and those that may have crashed it.
"""
