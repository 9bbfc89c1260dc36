"""Parts that an engine can do without, one line for each."""

from __future__ import annotations

from typing import Final

from sglang_coserve.srt.kv_checkpoint.setup import CheckpointSetup
from sglang_coserve.srt.kv_store import KvStoreSetup

KV_STORE: Final[KvStoreSetup] = CheckpointSetup()
"""With ``KvStoreSetup()`` there is no store: KV of requests that gave way is computed again."""
