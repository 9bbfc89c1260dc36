"""The durable line engine: every line of a file gets exactly one record, whatever happens.

The server's Batch API (``batch``) and the client that sends lines one by one (``client``)
both run on it. It knows neither databases nor HTTP, and no engine: a ``Backend`` serves
lines.

- ``line_run`` takes the unfinished lines of one job to their records.
- ``line_source``, ``prefix_order``: which line is next. ``fair_slots``: whose.
- ``serve_line``, ``retry``: one line, as often as it takes. ``journal``: its tokens so far.
- ``result_log``, ``result_writer``, ``result_record``: the files of records; ``progress``
  counts what is in them.
- ``engine_lines``: what the engine has, and what it may have died of.
"""
