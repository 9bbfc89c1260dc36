"""``python -m sglang_coserve.launch_server``: SGLang's server, with offline requests behind online.

Takes every flag of ``python -m sglang.launch_server`` and the coserve group.
"""

from __future__ import annotations

import sys

# SGLang's processes are spawned and import this module again as __mp_main__:
# nothing but the package itself may be loaded before the guard.
if __name__ == "__main__":
    from sglang_coserve.srt.launch import main

    sys.exit(main(sys.argv[1:]))
