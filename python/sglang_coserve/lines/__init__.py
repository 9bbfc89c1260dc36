"""The durable line engine: every line of a file gets exactly one record, also across crashes.

The Batch API (``batch``) uses it. It depends neither on databases nor on HTTP nor on an engine: a
``Backend`` serves lines.

- ``line_run`` serves the unfinished lines of one job and writes their records.
- ``line_source`` chooses the next line of a job, ``fair_slots`` the next job.
- ``serve_line`` serves one line, with retries; ``journal`` keeps its tokens so far.
- ``result_log`` writes the files of records; ``result_record`` encodes them and sums them up.
- ``engine_lines`` keeps the lines in the engine, and the lines that may have crashed it.
"""
