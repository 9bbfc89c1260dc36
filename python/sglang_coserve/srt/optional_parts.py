"""Parts that an engine can do without, one line for each."""

from __future__ import annotations

from typing import Final

from sglang_coserve.srt.kv_checkpoint.setup import CheckpointSetup
from sglang_coserve.srt.kv_moves.setup import FileMovesSetup
from sglang_coserve.srt.kv_store import KvStoreSetup
from sglang_coserve.srt.request_moves import RequestMovesSetup

KV_STORE: Final[KvStoreSetup] = CheckpointSetup()
"""With ``KvStoreSetup()`` there is no store: KV of requests that gave way is computed again."""

REQUEST_MOVES: Final[RequestMovesSetup] = FileMovesSetup()
"""With ``RequestMovesSetup()`` requests go on in other engines without their KV. Files have what
the store of checkpoints keeps in host memory."""
