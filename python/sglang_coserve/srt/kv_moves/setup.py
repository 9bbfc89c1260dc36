"""Sets moves of KV up in an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.request_moves import RequestMoves, RequestMovesSetup

if TYPE_CHECKING:
    from sglang_coserve.srt.admission.admission import Admission
    from sglang_coserve.srt.steps.engine_parts import EngineParts


class FileMovesSetup(RequestMovesSetup):
    """Sets moves by files up if ``--kv-move-dir`` names a directory.

    Its methods import the rest of the package: SGLang is not imported yet when this module is.
    """

    def server_settings(self, config: CoserveConfig) -> dict[str, Any]:
        """See ``RequestMovesSetup.server_settings``: files are of this layout of host pages."""
        return {} if config.kv_move_dir is None else {"hicache_mem_layout": "layer_first"}

    def check(self, config: CoserveConfig) -> None:
        """See ``RequestMovesSetup.check``; make the directory if there is none.

        Raises:
            StartupError: the directory cannot be used, or others may look into it.
        """
        if config.kv_move_dir is not None:
            from sglang_coserve.srt.kv_moves.kv_directory import KvDirectory

            KvDirectory.check(Path(config.kv_move_dir))

    def let_leave(
        self, config: CoserveConfig, tokenizer_manager: Any
    ) -> Callable[[Any], None] | None:
        """See ``RequestMovesSetup.let_leave``."""
        if config.kv_move_dir is None:
            return None
        from sglang_coserve.srt.kv_moves.line_departures import LineDepartures

        return LineDepartures(tokenizer_manager).ask

    def moves(
        self,
        parts: EngineParts,
        admission: Admission,
        background: TaskSupervisor,
        forget: Callable[[Any], None],
    ) -> RequestMoves:
        """See ``RequestMovesSetup.moves``.

        Raises:
            UnsupportedError: keys and values of the model are not of one size.
        """
        directory = parts.config.kv_move_dir
        if directory is None:
            return RequestMoves()
        from sglang_coserve.srt.kv_moves.file_moves import FileMoves
        from sglang_coserve.srt.kv_moves.kv_files import KvFiles

        files = KvFiles(parts.scheduler.tree_cache, Path(directory), background)
        return FileMoves(parts, admission, files, forget)
