"""The real executor: SGLang's model runner, its memory, its processes."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_coserve.cli.profile import PROFILE_SETTINGS, profile
from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.profiler.fits import load_profile
from sglang_coserve.profiler.shapes import StepShape, plan_grid
from sglang_coserve.srt.executor_process import ExecutorProcesses
from srt.scripted_engine import EngineProcess, ScriptedEngine

app = typer.Typer()
app.command(context_settings=PROFILE_SETTINGS)(profile)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def runs_what_it_is_asked(engine: ScriptedEngine) -> None:
    """Look at the batches that reach the model worker."""
    from sglang_coserve.srt.profiling.executor import SchedulerExecutor

    executor = SchedulerExecutor(engine.scheduler)
    worker = engine.scheduler.model_worker
    forward, seen = worker.forward_batch_generation, list[Any]()

    def look(batch: Any, **options: Any) -> Any:
        mode = batch.forward_mode
        lens = batch.seq_lens.tolist()
        new = [1] * len(lens) if mode.is_decode() else list(batch.extend_lens)
        cached = [total - fresh for total, fresh in zip(lens, new, strict=True)]
        if not mode.is_decode():
            assert list(batch.prefix_lens) == cached
        assert len(batch.input_ids) == sum(new) == len(set(batch.out_cache_loc.tolist()))
        seen.append((mode.name, list(zip(new, cached, strict=True))))
        return forward(batch, **options)

    worker.forward_batch_generation = look
    try:
        shapes = {
            "EXTEND": StepShape(prefills=((40, 0), (7, 33), (1, 16))),
            "DECODE": StepShape(decodes=(1, 15, 16, 17, 200)),
            "MIXED": StepShape(prefills=((20, 50),), decodes=(100, 1, 31)),
        }
        for mode, shape in shapes.items():
            assert executor.run(shape) > 0
            lengths = [*shape.prefills, *((1, context) for context in shape.decodes)]
            assert seen.pop() == (mode, lengths)
        for shape in plan_grid(executor.limits, 40):
            assert executor.run(shape) > 0
    finally:
        del worker.forward_batch_generation


def serves_the_same_before_and_after(engine: ScriptedEngine) -> None:
    from sglang_coserve.srt.profiling.executor import profile_quickly

    generator = random.Random(1)
    prompts = [generator.choices(range(300), k=length) for length in (5, 40, 200)]

    def serve(name: str) -> list[list[int]]:
        engine.run([engine.request(f"{name}{i}", p) for i, p in enumerate(prompts)])
        return [engine.output(f"{name}{i}") for i in range(len(prompts))]

    before = serve("before")
    engine.assert_nothing_leaked()
    samples = profile_quickly(engine.scheduler, 2.0)
    assert any(s.batch.prefill_requests for s in samples)
    assert any(s.batch.decode_requests for s in samples)
    engine.assert_nothing_leaked()
    assert serve("after") == before
    engine.assert_nothing_leaked()


@pytest.mark.parametrize(("overlap", "page_size"), [(False, 16), (True, 1)])
def test_a_scheduler_is_profiled_and_left_as_it_was(
    start_engine: Callable[..., EngineProcess], overlap: bool, page_size: int
) -> None:
    process = start_engine(overlap=overlap, page_size=page_size)
    process.call(runs_what_it_is_asked)
    process.call(serves_the_same_before_and_after)


def test_the_command_measures_and_reports(small_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    flags = ["--model-path", str(small_model), "-o", str(output), "--time-limit", "600", "--quiet"]
    engine_flags = ["--dtype", "float32", "--max-total-tokens", "2048"]
    text = invoke(*flags, *engine_flags, "--max-shapes", "40", "--kind", "polynomial")
    assert str(small_model) in text
    assert "repeat error" in text
    assert "45 measurements" in text  # Each shape, and five of them again.
    loaded = load_profile(output)
    assert loaded.latency_model.kind == "polynomial"
    assert loaded.report is not None
    assert loaded.tp_size == 1
    assert loaded.hardware


def test_an_unknown_kind_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cubic"):
        invoke("--model-path", "m", "-o", str(tmp_path / "p.json"), "--kind", "cubic")


def answer_late(connection: Any) -> None:
    connection.recv()
    time.sleep(60.0)


def die(connection: Any) -> None:
    connection.recv()


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_a_rank_that_dies_ends_the_wait_for_another_that_waits_for_it(dies: str) -> None:
    context = multiprocessing.get_context("fork")
    executor = ExecutorProcesses.__new__(ExecutorProcesses)
    executor._connections, executor._processes = [], []
    for target in (answer_late, die):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        executor._connections.append(ours)
        executor._processes.append(process)
    if dies == "before":
        process.kill()
        process.join()
    with executor, pytest.raises(ServerError, match="process 1 died with exit code"):
        executor.run(StepShape(decodes=(1,)))
