"""One load: SGLang's bench_serving in a process of its own, and what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sglang_coserve.config.flags import FlagParser
from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.metrics import Outcome, RequestTimeline

_POLL_S: Final = 0.1
_LOG_TAIL_LINES: Final = 20
_BODY_FLAG: Final = "--extra-request-body"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one load gave."""

    report: Mapping[str, Any]
    """SGLang's own, as in its ``--output-file``."""

    timelines: tuple[RequestTimeline, ...]
    """On the clock of ``time.perf_counter``, one for all processes of a machine."""

    unsent: int
    """Requests that were left when the load was told to end."""

    steady_state: Mapping[str, Any] | None
    """SGLang's, of this load; None where it finds none or is too old to look for it."""

    @property
    def began_s(self) -> float:
        """When the first request was sent."""
        return min(timeline.arrival_s for timeline in self.timelines)

    @property
    def ended_s(self) -> float:
        """When the last token came."""
        return max(
            timeline.token_times_s[-1] for timeline in self.timelines if timeline.token_times_s
        )


class LoadProcess:
    """bench_serving, started at once; a context manager, which ends it on leaving.

    It makes its requests and waits for ``go``. Its output is ``NAME.log`` in the folder, its
    report, in SGLang's form, ``NAME.jsonl``.
    """

    def __init__(self, name: str, base_url: str, flags: Sequence[str], folder: Path) -> None:
        self._name = name
        self._log_path = folder / f"{name}.log"
        self._report = folder / f"{name}.jsonl"
        self._events = folder / f"{name}.events.jsonl"
        for path in (self._report, self._events):  # bench_serving appends.
            path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "sglang_coserve.srt.bench_client"]
        command += ["--events", str(self._events), "--base-url", base_url]
        command += ["--output-file", str(self._report), "--disable-tqdm", *flags]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Otherwise what it says before it fails may be lost.
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # Its own group: a terminal's Ctrl-C reaches only us.
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def go(self) -> None:
        """Let it send."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended: whoever waits for it says so.
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Let it send nothing more; ``result`` then waits only for what is under way."""
        self._process.send_signal(signal.SIGTERM)

    def wait_for(self, event: str, timeout_s: float) -> dict[str, Any]:
        """Wait for one of its events: ``ready``, ``answered`` or ``measured``.

        Raises:
            ServerError: it ended before, or it took longer.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            has_ended = self._process.poll() is not None
            for told in self._told():
                if told["event"] == event:
                    return told
            if has_ended:
                raise ServerError(f"the {self._name} load failed; {self._log_end()}")
            if time.monotonic() > deadline_s:
                late = f"the {self._name} load was not {event} after {timeout_s:g} s"
                raise ServerError(f"{late}; {self._log_end()}")
            time.sleep(_POLL_S)

    def result(self, timeout_s: float) -> LoadResult:
        """Wait until it is over.

        Raises:
            ServerError: it failed, took longer, or none of its requests succeeded.
        """
        measured = self.wait_for("measured", timeout_s)
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0 or not self._report.exists():
            raise ServerError(f"the {self._name} load gave no report; {self._log_end()}")
        timelines = tuple(
            _timeline(f"{self._name}-{number}", each)
            for number, each in enumerate(measured["requests"])
        )
        if not any(timeline.token_times_s for timeline in timelines):
            said = next((each["error"] for each in measured["requests"] if each["error"]), "")
            raise ServerError(f"no request of the {self._name} load got a token: {said[:500]}")
        return LoadResult(
            report=json.loads(self._report.read_text().splitlines()[-1]),
            timelines=timelines,
            unsent=measured["unsent"],
            steady_state=measured["steady_state"],
        )

    def _told(self) -> list[dict[str, Any]]:
        if not self._events.exists():
            return []
        # A line that is just being written has no end yet.
        lines = self._events.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _log_end(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return f"its log ({self._log_path}) ends with:\n" + "\n".join(lines)


def with_body(flags: Sequence[str], body: Mapping[str, Any]) -> list[str]:
    """Return flags of bench_serving with ``body`` added to what each request has of its own.

    Raises:
        ConfigError: a given body is no JSON object, or sets a field of ``body``.
    """
    parser = FlagParser(add_help=False)
    parser.add_argument(_BODY_FLAG, dest="text", default="{}")
    own, kept = parser.parse_known_args(flags)
    try:
        given = json.loads(own.text)
    except ValueError as error:
        raise ConfigError(f"{_BODY_FLAG} {own.text!r} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{_BODY_FLAG} {own.text!r} is not a JSON object")
    if both := sorted(given.keys() & body.keys()):
        raise ConfigError(f"{_BODY_FLAG} sets {', '.join(both)}, which marks the loads here")
    return [*kept, _BODY_FLAG, json.dumps({**given, **body})] if given or body else kept


def _timeline(rid: str, request: Mapping[str, Any]) -> RequestTimeline:
    """Return a request's times; tokens that came together are spread over bench_serving's gaps."""
    times_s = [request["start_s"] + request["ttft_s"]]
    for gap_s in request["itls_s"]:
        times_s.append(times_s[-1] + gap_s)
    num = request["output_tokens"]
    return RequestTimeline(
        rid=rid,
        arrival_s=request["start_s"],
        token_times_s=tuple(times_s[i * len(times_s) // num] for i in range(num)),
        prompt_tokens=request["prompt_tokens"],
        outcome=Outcome.FINISHED if request["is_ok"] else Outcome.FAILED,
    )
