"""What an operator sees: the last minutes, how online users stand, and the page that shows it.

- ``standing``: samples of the server's status, once a second, kept for minutes; whether online
  users are hurt, and by how much because of offline work.
- ``page``: the HTML page, assembled from the files in ``page/``.

Pure: who serves it (``srt/routes/engine_routes.py``, ``fleet/gateway.py``) brings the samples
and the time.
"""
