"""Stock SGLang's server where torchvision is a CUDA build beside a CPU torch.

Nothing of co-serving takes part: importing the package only makes torchvision
importable, in this process and in those it spawns.
"""

import sys

import sglang_coserve  # noqa: F401

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
