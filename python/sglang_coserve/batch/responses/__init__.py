"""Annex: responses in the background, each a batch of one line that no list shows."""

from __future__ import annotations

from typing import Final

from sglang_coserve.batch.annex import Annex
from sglang_coserve.batch.responses.responses import ID_PREFIX, RESPONSES
from sglang_coserve.batch.responses.routes import retrieve_response, router

BACKGROUND_RESPONSES: Final = Annex(
    first_routers=(router,),
    endpoints={f"{RESPONSES}/{ID_PREFIX}{0:024x}": retrieve_response},
)
