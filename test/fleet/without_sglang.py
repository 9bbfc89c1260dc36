"""``python -m fleet.without_sglang``: the gateway where torch and SGLang cannot be imported."""

from __future__ import annotations

import sys

ABSENT = ("torch", "sglang", "transformers", "sgl_kernel")

if __name__ == "__main__":
    sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
    from sglang_coserve.fleet.__main__ import main

    sys.exit(main(sys.argv[1:]))
