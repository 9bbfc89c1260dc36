"""Chooses, for the installed SGLang, among what differs between versions.

A file ``vN`` holds what has changed with 0.5.N; its ``__all__`` lists it. Each file is imported
over the earlier ones, so of each function that of the last file counts whose version is not newer
than SGLang. No other module asks for the version.
"""

from __future__ import annotations

from sglang_coserve.srt.compat.v17 import *  # noqa: F403
from sglang_coserve.srt.compat.v17 import __all__ as __all__
from sglang_coserve.srt.compat.versions import INSTALLED

if INSTALLED >= (0, 5, 18):
    from sglang_coserve.srt.compat.v18 import *  # noqa: F403
if INSTALLED >= (0, 5, 19):
    from sglang_coserve.srt.compat.v19 import *  # noqa: F403
if INSTALLED >= (0, 5, 20):
    from sglang_coserve.srt.compat.v20 import *  # noqa: F403
if INSTALLED >= (0, 5, 21):
    from sglang_coserve.srt.compat.v21 import *  # noqa: F403
if INSTALLED >= (0, 5, 22):
    from sglang_coserve.srt.compat.v22 import *  # noqa: F403
