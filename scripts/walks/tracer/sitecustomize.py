"""Notes in every process of a server which files of ours run. Python imports it when it starts.

``COSERVE_WALK_DIR`` names a folder. Its file ``phase`` has the name of the phase; when that
changes, each process writes the files of the phase that is over to ``<phase>.<pid>.json``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = f"{os.sep}sglang_coserve{os.sep}"
_POLL_S = 0.05


def _install(folder: Path) -> None:
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and _OURS in code.co_filename and code.co_name != "<module>":
            seen.add(code.co_filename)

    def follow() -> None:
        phase = ""
        while True:
            latest = (folder / "phase").read_text()
            if latest != phase:
                files = list(seen)
                seen.clear()
                if phase:
                    path = folder / f"{phase}.{os.getpid()}.json"
                    path.write_text(json.dumps(files))
                phase = latest
            time.sleep(_POLL_S)

    threading.Thread(target=follow, daemon=True).start()
    threading.setprofile(note)
    sys.setprofile(note)


if folder := os.environ.get("COSERVE_WALK_DIR"):
    _install(Path(folder))
