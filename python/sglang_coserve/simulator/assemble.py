"""Makes machines and requests from the names and files that a user gives."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from sglang_coserve.core.latency_model.machine import Hardware, find_hardware
from sglang_coserve.core.latency_model.model_shape import MODELS, ModelShape, find_model
from sglang_coserve.core.latency_model.operators import kv_bytes_per_token
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import ConfigError, InputFileError, unreadable
from sglang_coserve.simulator.binding import from_jsonl, from_trace
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.workload.shape import fit_to_context
from sglang_coserve.workload.trace import TraceRequest, read_trace

LENGTHS: Final = re.compile(r"(\d+)x(\d+)", re.ASCII)
"""Names endless offline requests by the tokens of their prompts and outputs."""


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """A model on a number of devices of one kind."""

    shape: ModelShape
    hardware: Hardware
    tp_size: int

    @classmethod
    def named(cls, model: str, hardware: str, tp_size: int = 1) -> SimulatedMachine:
        """Look up model and hardware by name; a model may also be the path of a config.json.

        Raises:
            ConfigError: one of them is unknown, or ``tp_size`` is below 1.
            InputFileError: the config.json cannot be read.
        """
        if tp_size < 1:
            raise ConfigError(f"tp_size is {tp_size}: it must be at least 1")
        return cls(find_shape(model), find_hardware(hardware), tp_size)

    def roofline(self) -> RooflineModel:
        """Return a latency model from the datasheet.

        Raises:
            ConfigError: the model cannot be split over ``tp_size`` devices.
        """
        return RooflineModel.from_datasheet(self.shape, self.hardware, tp_size=self.tp_size)

    def copied_tokens_per_s(self, bytes_per_s: float) -> float:
        """Return the KV tokens copied per second, given the bytes per second of each device."""
        return bytes_per_s / kv_bytes_per_token(self.shape, self.tp_size)


def find_shape(model: str) -> ModelShape:
    """Return a model by name or from the path of a config.json.

    Raises:
        ConfigError: the name is unknown, or the config is not supported.
        InputFileError: the file cannot be read or is not JSON.
    """
    path = Path(model)
    if model.lower() in MODELS or path.suffix != ".json":
        return find_model(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(unreadable(path, error)) from error
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputFileError(f"{path}: expected a JSON object")
    return ModelShape.from_config(config, str(path))


def offline_requests(
    source: str, *, max_context_tokens: int, seed: int = 0
) -> Callable[[], Iterable[SimRequest]]:
    """Return a function that makes the offline requests named by ``source``.

    ``source`` is ``none``, lengths such as ``4096x256`` (endless requests with these
    prompt and output tokens, no two with a common prefix), a batch file
    in OpenAI's format, or a trace.

    Raises:
        InputFileError: a file is not usable.
        ConfigError: the lengths are below 1 or beyond the context.
    """
    if source == "none":
        return tuple
    make = partial(from_trace, request_class=RequestClass.OFFLINE, seed=seed)
    if match := LENGTHS.fullmatch(source):
        prompt_tokens, output_tokens = int(match[1]), int(match[2])
        if min(prompt_tokens, output_tokens) < 1:
            raise ConfigError(f"offline lengths {source}: both must be at least 1 token")
        if prompt_tokens + output_tokens > max_context_tokens:
            raise ConfigError(
                f"offline lengths {source}: beyond the context of {max_context_tokens} tokens"
            )
        return lambda: make(
            TraceRequest(index, 0.0, prompt_tokens, output_tokens) for index in count()
        )
    path = Path(source)
    if _is_batch_file(path):
        deque(from_jsonl(path), maxlen=0)  # A bad line is named now, not in the middle of a run.
        return partial(from_jsonl, path)
    trace, _ = fit_to_context(read_trace(path), max_context_tokens)
    return lambda: make(trace)


def _is_batch_file(path: Path) -> bool:
    """Return whether a file is a batch file; Mooncake traces are JSONL, too."""
    if path.suffix != ".jsonl":
        return False
    try:
        with path.open(encoding="utf-8") as file:
            return "body" in json.loads(next(line for line in file if line.strip()))
    except (OSError, StopIteration, ValueError, TypeError, RecursionError):
        return False  # The trace reader reports what is wrong.
