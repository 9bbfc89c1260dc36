"""``python -m fleet.without_sglang``: the gateway where torch and SGLang cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ABSENT = ("torch", "sglang", "transformers", "sgl_kernel")


class Absent(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    from sglang_coserve.fleet.__main__ import main

    sys.exit(main(sys.argv[1:]))
