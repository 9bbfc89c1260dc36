"""``python -m sglang_coserve.srt.bench_serving``: SGLang's own load generator, unchanged.

Being inside this package makes torchvision importable beside a CPU build of
torch; on a CUDA machine ``python -m sglang.bench_serving`` is the same.
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
