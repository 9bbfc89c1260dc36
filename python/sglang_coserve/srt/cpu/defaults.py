"""Defaults with which SGLang runs on a machine without CUDA.

Users can override every default by setting the variable or the flag themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from sglang_coserve.srt import compat

FLAG_DEFAULTS = {
    "device": "cpu",
    # Becomes torch_native if the processor or the kernels lack AMX, after SGLang has checked
    # that the model allows it: gpt-oss refuses torch_native, which lacked attention sinks.
    "attention_backend": "intel_amx",
    "lora_backend": "torch_native",
    # A float32 model would otherwise run in float16, which is several times slower on a CPU.
    "dtype": "float32",
    # There is no second device to overlap with: it would only delay each token by a step.
    "disable_overlap_schedule": True,
    # The idle event loop would otherwise take a core from whatever else runs on the machine.
    "sleep_on_idle": True,
    # SGLang would otherwise claim most of the machine's memory for the KV cache.
    "max_total_tokens": 65536,
    # SGLang's value if it cannot tell the memory of a NUMA node. If it can, it first reserves
    # 12 GiB for activations, which is more than a small node has.
    "mem_fraction_static": 0.88,
}
"""Defaults of ServerArgs fields on a CPU."""


def has_cuda() -> bool:
    """True when torch sees a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def set_environment_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that SGLang reads when it is first imported."""
    environment.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # When a process has died, SGLang waits 5 s for a GPU core dump and up to 60 s for a stack dump
    # before it ends the others; until then the server accepts requests that cannot be answered.
    environment.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    environment.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")


@contextmanager
def cores_for(
    server_args: Any, environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Divide the cores evenly among the ranks started in this context, leaving one core over.

    The HTTP server and the detokenizer need that one: OpenMP threads that compete with other
    processes for a core make small matrix products many times slower. Variables that are set
    already are kept.
    """
    num_ranks = server_args.dp_size * server_args.tp_size * server_args.pp_size
    cores = sorted(os.sched_getaffinity(0))
    # If the variable is unset, SGLang wants a NUMA node for each set.
    num_sets = compat.num_core_sets(server_args)
    cores_of_set = [cores[number::num_sets] or cores for number in range(num_sets)]
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (len(cores) - 1) // num_ranks)),
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
            ",".join(map(str, of_set)) for of_set in cores_of_set
        ),
    }
    added = {name: value for name, value in defaults.items() if name not in environment}
    environment.update(added)
    try:
        yield
    finally:
        for name in added:
            environment.pop(name, None)
