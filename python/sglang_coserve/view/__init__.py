"""What an operator sees: the last minutes, how online users stand, and the page that shows it.

- ``history``: samples of the server's status, once a second, kept for minutes.
- ``standing``: whether online users are hurt, and by how much because of offline work.
- ``page``: the HTML page, assembled from the files in ``page/``.

Pure: who serves it (``srt/routes/view_routes.py``, ``fleet/gateway.py``) brings the samples
and the time.
"""

from __future__ import annotations

from sglang_coserve.view.history import History
from sglang_coserve.view.page import Page
from sglang_coserve.view.standing import LEVELS, fleet_standing, standing

__all__ = ["LEVELS", "History", "Page", "fleet_standing", "standing"]
