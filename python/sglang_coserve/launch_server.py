"""``python -m sglang_coserve.launch_server``: SGLang's server, with offline requests behind online.

Takes every flag of ``python -m sglang.launch_server`` and the coserve group.
"""

from __future__ import annotations

import gc
import signal
import sys

if __name__ in {"__main__", "__mp_main__"}:
    # What SGLang's imports make stays: to look through all of it for garbage, again and again,
    # takes a sixth of their time. ``freeze_imports`` sets this back. Not off: SGLang
    # has processes that are not ours.
    gc.set_threshold(*gc.get_threshold()[:2], 1000)

if __name__ == "__mp_main__":
    # A terminal's Ctrl-C reaches all processes: the server ends the others once it has stopped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

# SGLang's processes are spawned and import this module again as __mp_main__:
# nothing but the package itself may be loaded before the guard.
if __name__ == "__main__":
    from sglang_coserve.errors import MissingExtraError
    from sglang_coserve.terminal import tell

    try:
        from sglang_coserve.srt.launch import main
    except MissingExtraError as error:
        tell(error)
        sys.exit(2)

    sys.exit(main(sys.argv[1:]))
