"""The functions of ``v17`` or of ``v22``, by the installed SGLang. No other module asks for it."""

from __future__ import annotations

from sglang_coserve.srt.compat.versions import NEWEST, installed_version, uses_v22

if uses_v22(installed_version() or NEWEST):
    from sglang_coserve.srt.compat.v22 import *  # noqa: F403
else:
    from sglang_coserve.srt.compat.v17 import *  # noqa: F403
