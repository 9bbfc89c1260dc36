"""The functions of ``v17`` or of ``v23``, by the installed SGLang. No other module asks for it."""

from __future__ import annotations

from sglang_coserve.srt.compat.versions import NEWEST, installed_version, uses_v23

if uses_v23(installed_version() or NEWEST):
    from sglang_coserve.srt.compat.v23 import *  # noqa: F403
else:
    from sglang_coserve.srt.compat.v17 import *  # noqa: F403
