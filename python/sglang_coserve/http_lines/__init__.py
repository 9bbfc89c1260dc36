"""``lines.Backend`` over HTTP: one engine serves, line by line, what another process keeps.

``POST /coserve/lines`` is a stream in both directions: attempts at lines go in as JSON lines, and
what becomes of them comes out, each message with the attempt's id. ``GET /coserve/lines``
describes the backend. Both need the server's admin key: who has it says what goes on after which
tokens. A connection that closes aborts its attempts.
"""
