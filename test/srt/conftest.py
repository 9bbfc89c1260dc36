"""Engine processes shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.srt.cpu import defaults as cpu
from srt.scripted_engine import EngineProcess, EngineSpec, Spec, run_at_once

# SGLang looks once whether it runs on a CPU, when it is first imported.
if not cpu.has_cuda():
    cpu.set_environment_defaults()

KV_POOL_TOKENS = 1024
LOOPS_AND_PAGES = (
    pytest.param((False, 1), id="normal-page1"),
    pytest.param((True, 16), id="overlap-page16"),
    pytest.param((True, 1), id="overlap-page1", marks=pytest.mark.heavy),
    pytest.param((False, 16), id="normal-page16", marks=pytest.mark.heavy),
)
"""Whether the event loop overlaps, and the page size."""

CHUNK_TOKENS = 128

Reference = Callable[[Sequence[Spec]], dict[str, list[int]]]


@pytest.fixture(scope="module")
def start_engine(small_model: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines with a small KV pool and small prefill chunks; ends them with the module."""
    running: dict[EngineSpec, EngineProcess] = {}

    def start(
        *, stock: bool = False, overlap: bool = False, coserve: Any = (), **server_args: Any
    ) -> EngineProcess:
        settings = {
            "max_total_tokens": KV_POOL_TOKENS,
            "chunked_prefill_size": CHUNK_TOKENS,
            # Admit on optimistic guesses of output lengths, so that memory does run out.
            "schedule_conservativeness": 0.1,
            **server_args,
        }
        spec = EngineSpec(
            small_model,
            stock=stock,
            overlap=overlap,
            server_args=tuple(sorted(settings.items())),
            coserve=tuple(dict(coserve).items()),
        )
        if spec not in running or not running[spec].is_alive:
            running[spec] = EngineProcess(spec)
        return running[spec]

    yield start
    for process in running.values():
        process.close()


@pytest.fixture(params=LOOPS_AND_PAGES)
def engine(request: pytest.FixtureRequest, start_engine: Any) -> EngineProcess:
    """The default settings, in both event loops, with pages of 1 and 16 tokens."""
    overlap, page_size = request.param
    return start_engine(overlap=overlap, page_size=page_size)


@pytest.fixture(scope="module")
def reference_outputs(start_engine: Any) -> Reference:
    """Greedy outputs of stock SGLang, on an engine with memory for all requests at once."""
    known: dict[str, list[int]] = {}

    def outputs(specs: Sequence[Spec]) -> dict[str, list[int]]:
        key = {spec[0]: repr(spec[1:3]) for spec in specs}
        missing = [spec for spec in specs if key[spec[0]] not in known]
        if missing:
            stock = start_engine(stock=True, max_total_tokens=65536, chunked_prefill_size=8192)
            for rid, output in stock.call(run_at_once, missing).items():
                known[key[rid]] = output
        return {rid: known[key[rid]] for rid in key}

    return outputs
