"""One Batch API in front of many engines: ``coserve gateway``. Neither torch nor SGLang is needed.

The jobs, their files and their tokens are kept here, as a single server keeps them; engines
serve attempts at lines (``http_lines``). What ends an attempt, an engine's
death or drain or another model, ends nothing else: the line goes on elsewhere.
"""
