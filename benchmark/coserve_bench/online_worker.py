"""A process that runs ``sglang.bench_serving`` several times, with arrivals of our choosing.

Its command line knows Poisson arrivals only, and random lengths only. The
program itself can do more: a request of its dataset may have a timestamp, and
its generator follows timestamps when told to. So three of its functions are
wrapped, nothing else: the dataset comes from a file of ours, the generator
follows the timestamps, and the time when each request starts is kept, which
its report leaves out. Sending, timing and reporting are untouched.

Orders come as JSON on stdin, answers leave as single words on what was stdout:
``ready`` after the imports; for each order ``loaded``, then, after a line on
stdin, the run, then ``done`` or ``failed``. One process for all runs, because
importing SGLang takes longer than some runs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import sglang_coserve  # noqa: F401  Makes torchvision importable beside a CPU build of torch.


def main() -> None:
    """Answer orders until stdin ends."""
    # bench_serving prints to stdout: give it stderr, which is the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from sglang.benchmark import serving

    original = {name: getattr(serving, name) for name in ("get_dataset", "get_request")}
    send = serving.ASYNC_REQUEST_FUNCS["sglang"]
    print("ready", file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        starts: list[tuple[float, float]] = []
        serving.get_dataset = partial(_dataset, serving, Path(order["requests"]), answers)
        serving.get_request = partial(_timed_requests, original["get_request"])
        serving.ASYNC_REQUEST_FUNCS["sglang"] = partial(_send, send, starts)
        sys.argv = ["bench_serving", *order["flags"]]
        try:
            serving.cli_main()
        except (Exception, SystemExit):
            traceback.print_exc()
            print("failed", file=answers)
            continue
        starts.sort()
        Path(order["starts"]).write_text(json.dumps([start_s for _, start_s in starts]))
        print("done", file=answers)


def _dataset(serving: Any, path: Path, answers: TextIO, *_: Any) -> list[Any]:
    """Read the requests, say so, and return them on command.

    The first one has no timestamp: it is for the warm-up, whose prompt would
    otherwise be in the prefix cache when it is measured.
    """
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [
        serving.DatasetRow(
            prompt=request["prompt_ids"],
            prompt_len=len(request["prompt_ids"]),
            output_len=request["output_tokens"],
            timestamp=request["timestamp_ms"],
        )
        for request in requests
    ]
    # A full collection would delay every request of a third of a second.
    gc.collect()
    gc.freeze()
    print("loaded", file=answers)
    sys.stdin.readline()
    return rows


def _timed_requests(
    get_request: Any, rows: list[Any], request_rate: float
) -> AsyncGenerator[Any, None]:
    del rows[0]  # In place: the report compares this list with what was sent.
    requests: AsyncGenerator[Any, None] = get_request(rows, request_rate, use_trace_timestamps=True)
    return requests


async def _send(
    send: Any, starts: list[tuple[float, float]], request_func_input: Any, pbar: Any = None
) -> Any:
    output = await send(request_func_input=request_func_input, pbar=pbar)
    if request_func_input.timestamp is not None:
        starts.append((request_func_input.timestamp, output.start_time))
    return output


if __name__ == "__main__":
    main()
