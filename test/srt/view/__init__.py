"""``/coserve`` and ``/coserve/view`` on a real server."""
