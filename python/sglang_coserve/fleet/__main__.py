"""``python -m sglang_coserve.fleet``: the same as ``coserve gateway``."""

from __future__ import annotations

import sys

from sglang_coserve.fleet.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
