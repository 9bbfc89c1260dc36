"""An emulated model without a server: in the engine of a program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.own_process import OwnProcess
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.emulation.model_directory import make_emulated_model
from sglang_coserve.srt.emulation.settings import Emulation
from srt.own_engine import params

EMULATED = Emulation.of("llama-3.1-8b", "h100")
LIMITS = {"max_running_requests": 16, "max_total_tokens": 16384}
OUTPUT_TOKENS = 64
TIMEOUT_S = 500.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("emulated")
    return make_emulated_model(directory, EMULATED, vocab=1024, context=4096)


class ProgramWithEngine:
    """For ``OwnProcess``."""

    def __init__(self, model: Path) -> None:
        from sglang_coserve.config import CoserveConfig
        from sglang_coserve.srt.engine import CoserveEngine

        config = CoserveConfig(startup_profile_seconds=1.0)
        self._engine = CoserveEngine(model_path=str(model), coserve_config=config, **LIMITS)

    def generate(self, prompt: Sequence[int]) -> tuple[list[list[int]], float]:
        """Compute a prompt online and offline; return the tokens of both, and the seconds."""
        asks = [params(OUTPUT_TOKENS, offline=offline) for offline in (False, True)]
        begin_s = time.perf_counter()
        outputs = self._engine.generate(input_ids=[list(prompt)] * 2, sampling_params=asks)
        seconds = time.perf_counter() - begin_s
        return [output["output_ids"] for output in outputs], seconds


def test_the_engine_of_a_program_has_a_gpus_pace_and_says_what_it_is(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with OwnProcess(ProgramWithEngine, model) as program:
        (online, offline), seconds = program.call("generate", range(10, 500), timeout_s=TIMEOUT_S)
    assert online == offline
    assert len(set(online)) > OUTPUT_TOKENS / 4
    step_s = EMULATED.latency_model().predict(StepStats.of([], [500]))
    assert seconds > 0.9 * OUTPUT_TOKENS * step_s
    assert f"EMULATED: no GPU computes here, and figures are not of one: {EMULATED.name}" in (
        capfd.readouterr().err
    )
