"""Sends online requests with ``sglang.bench_serving`` and reads what it measured."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from common.failures import RunFailedError
from sglang_coserve.metrics import Outcome, RequestTimeline
from sglang_coserve.workload import FIRST_TEXT_TOKEN_ID, TraceRequest, prompt_token_ids

__all__ = ["OnlineLoad", "OnlineResult", "timelines_of"]

_BENCHMARKS = Path(__file__).resolve().parent.parent
_IMPORT_TIMEOUT_S = 300.0
_LOAD_TIMEOUT_S = 120.0
_WARMUP_PROMPT_TOKENS = 32
_WARMUP_OUTPUT_TOKENS = 8

_REPORTED: Final = (
    *("completed", "duration", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p99_tpot_ms", "mean_itl_ms", "p99_itl_ms", "output_throughput"),
)
"""Entries of bench_serving's own report that are kept beside ours."""


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """What became of the online requests of one run, times in seconds since the window's start."""

    timelines: tuple[RequestTimeline, ...]
    began_s: float
    """The window's start, at first the first arrival, on the clock of ``time.perf_counter``."""

    reported: Mapping[str, float]
    """Some of bench_serving's own summary, of all requests that were sent."""

    def since(self, start_s: float) -> OnlineResult:
        """Return the requests that arrive from then on, with times counted from there."""
        later = (timeline for timeline in self.timelines if timeline.arrival_s >= start_s)
        return OnlineResult(
            tuple(_moved(timeline, -start_s) for timeline in later),
            self.began_s + start_s,
            self.reported,
        )


class OnlineLoad:
    """The process of ``online_worker``, kept from run to run, started when it is needed.

    For each run ``load`` and then ``go``. ``time.perf_counter`` is one clock for
    all processes of a machine, so its times can be compared with ours.
    """

    def __init__(self, work: Path, log_path: Path) -> None:
        """``work`` is a folder for files passed to and from the process."""
        self._work = work
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def load(
        self,
        base_url: str,
        model: str,
        requests: Sequence[TraceRequest],
        *,
        vocab_size: int,
        seed: int,
        body: Mapping[str, Any],
    ) -> None:
        """Prepare the next run; ``body`` is added to each request's.

        Raises:
            RunFailedError: the process ended or gave no answer in time.
        """
        await self._start()
        self._write_requests(requests, vocab_size, seed)
        for path in (self._report, self._starts):
            path.unlink(missing_ok=True)
        flags = [
            *("--backend", "sglang", "--base-url", base_url, "--model", model),
            *("--dataset-name", "random-ids", "--tokenize-prompt"),
            *("--num-prompts", str(len(requests)), "--warmup-requests", "1"),
            *("--output-file", str(self._report), "--output-details", "--disable-tqdm"),
            *(("--extra-request-body", json.dumps(dict(body))) if body else ()),
        ]
        order = {"flags": flags, "requests": str(self._requests), "starts": str(self._starts)}
        self._send_line(json.dumps(order))
        await self._expect("loaded", _LOAD_TIMEOUT_S)

    async def go(self, timeout_s: float) -> OnlineResult:
        """Send what was loaded and wait for every answer.

        Raises:
            RunFailedError: the process ended, or the answers took longer than ``timeout_s``.
        """
        self._send_line("go")
        await self._expect("done", timeout_s)
        report = json.loads(self._report.read_text().splitlines()[-1])
        starts_s = json.loads(self._starts.read_text())
        return OnlineResult(
            timelines=timelines_of(report, starts_s),
            began_s=starts_s[0],
            reported={name: report[name] for name in _REPORTED},
        )

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    @property
    def _requests(self) -> Path:
        return self._work / "online_requests.jsonl"

    @property
    def _report(self) -> Path:
        return self._work / "online_report.jsonl"

    @property
    def _starts(self) -> Path:
        return self._work / "online_starts.json"

    async def _start(self) -> None:
        if self._process is not None and self._process.returncode is None:
            return
        paths = (str(_BENCHMARKS), os.environ.get("PYTHONPATH", ""))
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "coserve_bench.online_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                # A terminal's Ctrl-C reaches only us, and we end the process.
                start_new_session=True,
            )
        await self._expect("ready", _IMPORT_TIMEOUT_S)

    def _write_requests(self, requests: Sequence[TraceRequest], vocab_size: int, seed: int) -> None:
        warmup = TraceRequest(len(requests) + 1, 0.0, _WARMUP_PROMPT_TOKENS, _WARMUP_OUTPUT_TOKENS)
        with self._requests.open("w") as file:
            for request in (warmup, *requests):
                ids = prompt_token_ids(
                    request, vocab_size=vocab_size, seed=seed, first_token_id=FIRST_TEXT_TOKEN_ID
                )
                line = {
                    "timestamp_ms": None if request is warmup else request.arrival_s * 1e3,
                    "prompt_ids": ids.tolist(),
                    "output_tokens": request.output_tokens,
                }
                file.write(json.dumps(line) + "\n")

    def _send_line(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _expect(self, word: str, timeout_s: float) -> None:
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                answer = (await self._process.stdout.readline()).decode().strip()
        except TimeoutError:
            answer = f"nothing for {timeout_s:.0f} s"
        if answer != word:
            await self.close()
            raise RunFailedError(
                f"bench_serving answered {answer or 'by ending'!r} where {word!r} was due; "
                f"its log is {self._log_path}"
            )


def _moved(timeline: RequestTimeline, by_s: float) -> RequestTimeline:
    return replace(
        timeline,
        arrival_s=timeline.arrival_s + by_s,
        token_times_s=tuple(time_s + by_s for time_s in timeline.token_times_s),
    )


def timelines_of(
    report: Mapping[str, Any], starts_s: Sequence[float]
) -> tuple[RequestTimeline, ...]:
    """Return the requests in a detailed report, timed from the first start.

    bench_serving gives the TTFT and one gap for each token it saw after; it
    shares a gap evenly among tokens that came together. Tokens before the first
    text come with it.
    """
    rows = zip(
        *(report[name] for name in ("input_lens", "output_lens", "ttfts", "itls", "errors")),
        starts_s,
        strict=True,
    )
    timelines = []
    for number, (prompt, output, ttft_s, itls_s, error, start_s) in enumerate(rows):
        arrival_s = start_s - starts_s[0]
        failed = bool(error) or ttft_s <= 0
        later_s = list(accumulate(itls_s, initial=arrival_s + ttft_s))
        times_s = [] if failed else [later_s[0]] * (output - len(later_s)) + later_s
        timelines.append(
            RequestTimeline(
                rid=f"online-{number}",
                arrival_s=arrival_s,
                token_times_s=tuple(times_s),
                prompt_tokens=prompt,
                outcome=Outcome.FAILED if failed else Outcome.FINISHED,
            )
        )
    return tuple(timelines)
