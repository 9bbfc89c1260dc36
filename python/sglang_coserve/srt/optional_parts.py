"""Parts that an engine can do without, one line for each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sglang_coserve.guard.setup import Guard
from sglang_coserve.request_guard import RequestGuard
from sglang_coserve.srt.cpu.platform import Cpu
from sglang_coserve.srt.emulation.platform import EmulatedGpu
from sglang_coserve.srt.kv_checkpoint.setup import CheckpointSetup
from sglang_coserve.srt.kv_moves.setup import FileMovesSetup
from sglang_coserve.srt.kv_store import KvStoreSetup
from sglang_coserve.srt.platform import Gpu, Platform
from sglang_coserve.srt.request_moves import RequestMovesSetup

KV_STORE: Final[KvStoreSetup] = CheckpointSetup()
"""With ``KvStoreSetup()`` there is no store: KV of requests that gave way is computed again."""

REQUEST_MOVES: Final[RequestMovesSetup] = FileMovesSetup()
"""With ``RequestMovesSetup()`` requests go on in other engines without their KV. Files have what
the store of checkpoints keeps in host memory."""

EMULATED: Final[type[Platform]] = EmulatedGpu
"""With ``Platform`` nothing is emulated, and ``--emulate`` is refused."""

CPU: Final[type[Platform]] = Cpu
"""With ``Platform`` SGLang computes on GPUs alone, and nothing is emulated either."""

GUARD: Final[RequestGuard] = Guard()
"""With ``RequestGuard()`` no request is checked: for servers whose clients are all trusted."""


def platform_for(model: Path | None) -> Platform:
    """Return the first platform that serves a model; see ``Platform.serving``.

    Raises:
        InputFileError, ConfigError: see ``Platform.serving``.
    """
    platforms = (kind.serving(model) for kind in (EMULATED, CPU, Gpu))
    return next(found for found in platforms if found is not None)
