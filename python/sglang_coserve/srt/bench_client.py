"""SGLang's ``bench_serving`` as one of two loads on a server.

    python -m sglang_coserve.srt.bench_client --events FILE [flags of sglang.bench_serving]

SGLang's own code sends, measures and prints. Three things are added, so that two loads can run
beside each other: it begins when told, tells when each token came, and ends when told.

- With its requests made it writes ``ready`` to FILE and waits for a line on standard input.
- On SIGTERM it sends nothing more. What is under way is answered, then it reports as usual.
- FILE gets a line of JSON for each event: ``ready``, ``answered`` (the first measured request)
  and ``measured`` with the times of all requests, on the clock of ``time.perf_counter``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from sglang.benchmark import serving

from sglang_coserve.srt.compat import replace, steady_state

_NOT_SENT: Final = "not sent: the load was told to end"


class _Load:
    """What bench_serving calls in place of its own functions, each of which it goes on to call."""

    def __init__(self, events: Path, concurrency_ratio: float) -> None:
        self._events = events
        self._concurrency_ratio = concurrency_ratio
        self._unsent = 0
        self._is_measured = False
        self._has_answered = False
        self._is_ending = False

    def install(self) -> None:
        """Take the place of bench_serving's functions."""
        signal.signal(signal.SIGTERM, self._end)
        for name, wrapped in (
            ("get_dataset", self._held),
            ("get_request", self._until_ended),
            ("get_mooncake_request_over_time", self._until_ended),
            ("calculate_metrics", self._measured),
        ):
            replace(f"sglang.benchmark.serving.{name}", wrapped(getattr(serving, name)))
        for backend, send in serving.ASYNC_REQUEST_FUNCS.items():
            serving.ASYNC_REQUEST_FUNCS[backend] = self._sent_by(send)

    def _end(self, *_signal: object) -> None:
        self._is_ending = True

    def _tell(self, event: str, **more: object) -> None:
        with self._events.open("a") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")

    def _held(self, get_dataset: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            requests = get_dataset(*args, **kwargs)
            self._unsent = len(requests)
            self._tell("ready")
            if not sys.stdin.readline():
                sys.exit("whoever started this load has ended")
            return requests

        return held

    def _until_ended(self, requests: Callable[..., Any]) -> Callable[..., Any]:
        async def until_ended(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            self._is_measured = True  # What came before was to warm up.
            async for request in requests(*args, **kwargs):
                if self._is_ending:
                    return
                self._unsent -= 1
                yield request

        return until_ended

    def _sent_by(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def sent(request_func_input: Any, pbar: Any = None) -> Any:
            if not self._is_measured:
                return await send(request_func_input=request_func_input, pbar=pbar)
            if self._is_ending:
                return serving.RequestFuncOutput(error=_NOT_SENT)
            output = await send(request_func_input=request_func_input, pbar=pbar)
            if output.success and not self._has_answered:
                self._has_answered = True
                self._tell("answered")
            return output

        return sent

    def _measured(self, calculate: Callable[..., Any]) -> Callable[..., Any]:
        def measured(**given: Any) -> Any:
            # In place: bench_serving's own report looks at the same lists afterwards.
            outputs, requests = given["outputs"], given["input_requests"]
            was_sent = [output.error != _NOT_SENT for output in outputs]
            if requests is not None:
                # More than outputs where the load ended before all had come.
                requests[:] = [each for each, was in zip(requests, was_sent) if was]  # noqa: B905
            outputs[:] = [each for each in outputs if each.error != _NOT_SENT]
            self._tell(
                "measured",
                unsent=max(0, self._unsent) + was_sent.count(False),
                requests=list(map(_times, outputs)),
                steady_state=steady_state(
                    outputs, given["tokenizer"], self._concurrency_ratio, requests
                ),
            )
            return calculate(**given)

        return measured


def _times(output: Any) -> dict[str, Any]:
    return {
        "is_ok": output.success,
        "start_s": output.start_time,
        "ttft_s": output.ttft,
        "itls_s": output.itl,
        "prompt_tokens": output.prompt_len,
        "output_tokens": output.output_len if output.success else 0,
        "error": output.error,
    }


def main(argv: Sequence[str]) -> None:
    """Run the load; its flags but for two are those of bench_serving."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--concurrency-ratio", type=float, default=0.8)
    own, others = parser.parse_known_args(argv)
    _Load(own.events, own.concurrency_ratio).install()
    sys.argv[1:] = others
    serving.cli_main()


if __name__ == "__main__":
    main(sys.argv[1:])
