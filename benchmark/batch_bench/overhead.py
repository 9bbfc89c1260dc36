"""What the Batch API costs the offline throughput of an engine."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from batch_bench.figures import Figure
from batch_bench.input_file import write_lines
from batch_bench.setting import Setting
from coserve_bench.failures import RunFailedError

__all__ = ["measure"]

_BENCHMARKS: Final = Path(__file__).resolve().parent.parent
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 32
_ANSWER_TIMEOUT_S: Final = 600.0
_GRACE_S: Final = 15.0
_TARGET_PERCENT: Final = 5.0


def measure(setting: Setting) -> list[Figure]:
    """Serve the same lines with the Batch API and with a bare feed, in turn, on one engine.

    Both are in the engine's process, so there is no HTTP in either.
    """
    options = setting.options
    path = setting.work / "overhead.jsonl"
    write_lines(
        path,
        options.overhead_lines,
        vocab_size=setting.model.vocab_size,
        prompt_tokens=_PROMPT_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
        seed=options.seed,
    )
    feed_s: list[float] = []
    api_s: list[float] = []
    with _Worker(setting, path) as worker:
        for repeat in setting.track(options.repeats, f"serving {options.overhead_lines:,} lines"):
            # Who comes first alternates, so that a slow change of the machine favours neither.
            for kind in ("feed", "api") if repeat % 2 == 0 else ("api", "feed"):
                (feed_s if kind == "feed" else api_s).append(worker.seconds(kind))
    tokens = options.overhead_lines * (_PROMPT_TOKENS + _OUTPUT_TOKENS)
    pairs = zip(feed_s, api_s, strict=True)
    percents = tuple(100 * (1 - feed / api) for feed, api in pairs)
    return [
        Figure("offline throughput, bare feed", "tokens/s", tuple(tokens / s for s in feed_s)),
        Figure("offline throughput, Batch API", "tokens/s", tuple(tokens / s for s in api_s)),
        Figure("throughput lost to the Batch API", "%", percents, at_most=_TARGET_PERCENT),
    ]


class _Worker:
    """The process of ``overhead_worker``."""

    def __init__(self, setting: Setting, path: Path) -> None:
        self._log_path = setting.logs / "overhead.log"
        self._command = [sys.executable, "-m", "batch_bench.overhead_worker"]
        self._command += [setting.model.path, str(path), str(setting.work / "overhead")]

    def __enter__(self) -> _Worker:
        paths = (str(_BENCHMARKS), os.environ.get("PYTHONPATH", ""))
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                # A terminal's Ctrl-C reaches only us, and we end the process.
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        # The engine's processes are in its group.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def seconds(self, kind: str) -> float:
        """Return what serving every line took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind}\n".encode())
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _ANSWER_TIMEOUT_S)[0]:
            raise RunFailedError(f"no answer for {_ANSWER_TIMEOUT_S:.0f} s: see {self._log_path}")
        line = stdout.readline()
        if not line:
            raise RunFailedError(f"the engine's process has ended: see {self._log_path}")
        answer: dict[str, Any] = json.loads(line)
        return answer
