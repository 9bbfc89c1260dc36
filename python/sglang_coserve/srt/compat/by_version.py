"""The functions of ``v17`` or ``v23``: only this module asks which of the two to import."""

from __future__ import annotations

from sglang_coserve.srt.compat.versions import NEWEST, installed_version, module_for

if module_for(installed_version() or NEWEST) == "v17":
    from sglang_coserve.srt.compat.v17 import *  # noqa: F403
else:
    from sglang_coserve.srt.compat.v23 import *  # noqa: F403
