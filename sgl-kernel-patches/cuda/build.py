"""Builds the library with conditional-node safepoints, and its test program, with nvcc.

python sgl-kernel-patches/cuda/build.py --out build [--arch sm_90]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["build", "find_nvcc"]

LIBRARY: Final = "libcoserve_conditional_node.so"
TEST_PROGRAM: Final = "conditional_node_test"

_SOURCES: Final = Path(__file__).parent
# Setting a condition from a kernel is a call into CUDA's device runtime, which is linked
# with relocatable code only.
_FLAGS: Final = ("-std=c++17", "-O2", "-rdc=true", "-Xcompiler=-fPIC,-Wall")


def find_nvcc() -> str | None:
    """Return CUDA's compiler, or None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def build(out: Path, arch: str = "sm_90") -> tuple[Path, Path]:
    """Build for a GPU architecture; return the library and the test program.

    Raises:
        FileNotFoundError: there is no nvcc.
        subprocess.CalledProcessError: it failed; ``stderr`` says why.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise FileNotFoundError("no nvcc: put it on PATH, or set CUDA_HOME")
    out.mkdir(parents=True, exist_ok=True)
    library, program = out / LIBRARY, out / TEST_PROGRAM
    common = [nvcc, *_FLAGS, f"-arch={arch}"]
    source, test = (_SOURCES / name for name in ("conditional_node.cu", "conditional_node_test.cu"))
    for command in (
        [*common, "-shared", str(source), "-o", str(library)],
        [*common, str(source), str(test), "-o", str(program)],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True)
    return library, program


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of what is built")
    parser.add_argument("--arch", default="sm_90", help="GPU architecture (H200: sm_90)")
    args = parser.parse_args()
    try:
        built = build(args.out, args.arch)
    except FileNotFoundError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr)
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in built))
    return 0


if __name__ == "__main__":
    sys.exit(main())
