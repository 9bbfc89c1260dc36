"""``python -m sglang_coserve.cli``: the command line, as ``coserve``."""

from sglang_coserve.cli import main

if __name__ == "__main__":
    main()
