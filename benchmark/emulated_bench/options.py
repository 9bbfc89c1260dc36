"""Command line and exit status, the same for ``bench_emulated`` and ``frontier``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from emulated_bench.cases import CHAT, TRAFFICS
from emulated_bench.compared import compared_loads
from emulated_bench.contenders import CHUNK_TOKENS, GROUPS, USUAL_GROUPS
from emulated_bench.picture import PICTURED, draw
from emulated_bench.tables import report
from interference_bench.chat import CHATS
from interference_bench.load import load_parser
from sglang_coserve.errors import ConfigError
from sglang_coserve.terminal import INTERRUPTED


def campaign_parser(description: str) -> argparse.ArgumentParser:
    """Return a command line with the loads, the systems, and where their figures go."""
    parser = load_parser(description, TRAFFICS)
    parser.set_defaults(traffic=[*TRAFFICS], repeats=3, seconds=30.0)
    parser.set_defaults(offline=[2048, 128], in_flight=200)
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="modelled")
    add("--hardware", default="h100", help="modelled")
    add("--tp", type=int, default=1, help="so many of these devices")
    add("--traces", type=Path, default=Path("traces"), help="folder of the traces")
    add("--requests", type=int, default=300, help="a run has at least so many online ones")
    add("--at-once", type=int, default=1000, help="requests that show what full load is")
    add("--chats", type=int, default=CHATS, help=f"at a time, of the traffic {CHAT}")
    add("--systems", nargs="+", choices=GROUPS, default=[*USUAL_GROUPS], help="groups to run")
    add("--forget", nargs="+", choices=("alone", *GROUPS), default=[], help="run these anew")
    add("--chunks", nargs="+", type=int, default=[*CHUNK_TOKENS], help="of stock SGLang, tokens")
    add("--picture", type=Path, help="draw the frontier of a load, as an SVG file")
    add("--pictured", default=PICTURED, help="name of the load")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of the figures")
    where.add_argument("--report", type=Path, help="print the tables of this folder, run nothing")
    return parser


def run_command(options: argparse.Namespace, measure: Callable[[argparse.Namespace], int]) -> int:
    """Measure, or print the tables of a folder, and return the exit status."""
    try:
        status = 0 if options.report else measure(options)
        loads = compared_loads(options.report or options.out)
        print(report(loads))
        if options.picture:
            draw(loads, options.pictured, options.picture)
        return status
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ended; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
