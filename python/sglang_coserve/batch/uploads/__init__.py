"""Annex: uploads in parts (``/v1/uploads``), as OpenAI's clients send large files."""

from __future__ import annotations

from typing import Final

from sglang_coserve.batch.annex import Annex
from sglang_coserve.batch.uploads.routes import part_router, router

UPLOADS: Final = Annex(routers=(router, part_router))
