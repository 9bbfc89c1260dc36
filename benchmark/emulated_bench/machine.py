"""The emulated device, and the engines on it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from common.own_process import OwnProcess
from interference_bench.engine import CpuClockEngine
from interference_bench.load import Load
from interference_bench.outcome import RunOutcome
from interference_bench.systems import EngineSystem
from interference_bench.traces import CONTEXT_TOKENS
from sglang_coserve.srt.emulation.model_directory import make_emulated_model
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.terminal import terminate_as_interrupt

_RUN_TIMEOUT_S: Final = 3600.0
_SPARE_TOKENS: Final = 768
"""Tokens of the context that SGLang keeps for itself."""

_PRELOADED: Final = ("sglang.srt.managers.scheduler",)
"""Modules that take longer to import than most runs take."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The emulated device, and the engines that run on it."""

    options: argparse.Namespace
    emulation: Emulation
    model: Path
    engines: ExitStack
    of_stock: dict[str, OwnProcess] = field(default_factory=dict)
    """Engines of stock SGLang, by their settings."""

    def run(self, system: EngineSystem, load: Load) -> RunOutcome:
        """Offer a load to an engine; without offline work if the system has none.

        Ours remembers traffic, so each run has an engine of its own and repeats exactly. Stock
        SGLang remembers prefixes alone, which are removed before each run, so its engines are kept.

        Raises:
            SystemExit: the run failed, with the engine's traceback.
        """
        offered = load if system.has_offline else load.alone()
        with self._engine(system) as engine:
            outcome: RunOutcome = engine.call("run", offered, timeout_s=_RUN_TIMEOUT_S)
        return outcome

    @contextmanager
    def _engine(self, system: EngineSystem) -> Iterator[OwnProcess]:
        if system.coserve is not None:
            with self._started(system) as engine:
                yield engine
            return
        key = repr(system)
        if key not in self.of_stock:
            self.of_stock[key] = self.engines.enter_context(self._started(system))
        try:
            yield self.of_stock[key]
        except BaseException:
            self.of_stock.pop(key).end()  # The next run gets a new one.
            raise

    def _started(self, system: EngineSystem) -> OwnProcess:
        return OwnProcess(
            CpuClockEngine,
            system,
            self.model,
            self.options.core,
            {},
            self.options.host_factor,
            stops_when_idle=True,
            preloaded=_PRELOADED,
        )


@contextmanager
def machine_of(options: argparse.Namespace, emulation: Emulation) -> Iterator[Machine]:
    """Make an emulated model, and end its engines at last."""
    with ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        context = CONTEXT_TOKENS + _SPARE_TOKENS
        model = make_emulated_model(folder / "model", emulation, vocab=2048, context=context)
        yield Machine(options, emulation, model, stack)
