"""Batches on a real server beside online requests: what was said of them, and what they took."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import openai

from common.batch_server import BatchServer, openai_client
from common.input_file import write_lines
from common.model import ServedModel, prepare_model

__all__ = ["live"]

_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.1
_IN_PARALLEL: Final = 2
"""Batches at a time."""


def live(
    work: Path,
    *,
    model_path: str | None,
    server_flags: tuple[str, ...],
    learned: int,
    judged: int,
    online_rate_per_s: float,
    seed: int,
) -> dict[str, Any]:
    """Serve ``learned`` batches that the forecast learns from, then judge ``judged`` more."""
    model = prepare_model(model_path, work)
    flags = ["--model-path", model.path, "--log-level", "warning", *server_flags]
    rng = random.Random(seed)
    with (
        BatchServer(flags, work / "data", work / "server.log", _TIMEOUT_S) as server,
        _online(server.base_url, model, online_rate_per_s, seed),
        ThreadPoolExecutor(_IN_PARALLEL) as pool,
    ):
        works = [
            (server, model, work / f"{number}.jsonl", rng.randrange(1 << 30))
            for number in range(learned + judged)
        ]
        found = list(pool.map(lambda each: _one(*each), works))[learned:]
    held = [each["actual_s"] <= each["p95_s"] for each in found]
    errors = [abs(each["actual_s"] - each["p50_s"]) / each["actual_s"] for each in found]
    return {
        "batches": len(found),
        "learned_from": learned,
        "median_duration_s": round(median(each["actual_s"] for each in found), 2),
        "before_p95": round(sum(held) / len(held), 4),
        "median_abs_error_p50": round(median(errors), 4),
        "median_p95_over_p50": round(median(each["p95_s"] / each["p50_s"] for each in found), 3),
        "each": found,
    }


def _one(server: BatchServer, model: ServedModel, path: Path, seed: int) -> dict[str, float]:
    """Serve one batch of random lengths; the object tells whole seconds, so the times are rounded
    as it rounds them."""
    rng = random.Random(seed)
    count = rng.randrange(40, 250)
    output_tokens = rng.choice((16, 32, 64))
    prompt_tokens = rng.randrange(16, 128)
    write_lines(
        path,
        count,
        vocab_size=model.vocab_size,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seed=seed,
    )
    file_id = server.upload(path)
    window: Any = "24h"
    batch = server.client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window=window
    )
    said = batch.model_extra["coserve"] if batch.model_extra else {}
    done = server.until(batch.id, "completed", timeout_s=_TIMEOUT_S, poll_s=_POLL_S)
    assert done.completed_at is not None
    return {
        "lines": count,
        "p50_s": max(said["eta"] - batch.created_at, 0.5),
        "p95_s": max(said["eta_p95"] - batch.created_at, 0.5),
        "actual_s": max(done.completed_at - batch.created_at, 0.5),
    }


@contextmanager
def _online(base_url: str, model: ServedModel, rate_per_s: float, seed: int) -> Iterator[None]:
    """Within it online requests come at random times."""
    stop = threading.Event()
    rng = random.Random(seed)
    client = openai_client(base_url)

    def ask(prompt: list[int], tokens: int) -> None:
        with suppress(openai.OpenAIError):
            client.completions.create(model="default", prompt=prompt, max_tokens=tokens)

    def send() -> None:
        with ThreadPoolExecutor(64) as pool:
            while not stop.wait(rng.expovariate(rate_per_s)):
                prompt = rng.choices(range(16, model.vocab_size), k=rng.randrange(16, 200))
                pool.submit(ask, prompt, rng.randrange(4, 32))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_TIMEOUT_S)
        client.close()
