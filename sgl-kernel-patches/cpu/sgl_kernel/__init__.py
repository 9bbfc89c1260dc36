"""A stand-in for ``sgl_kernel`` on machines where no build of it exists.

SGLang's CPU path imports names from ``sgl_kernel`` whether or not the running
model reaches them.  What a Llama- or Qwen-class text model does reach is here in
plain torch; any other name can be imported but raises ``NotImplementedError``
with its own name when called.  Of the ``torch.ops.sgl_kernel`` operators none but
those of linear attention are there, which is how SGLang learns that the AMX kernels are absent.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ._cache_locs import assign_extend_cache_locs_cpu, assign_req_to_token_pool_cpu
from .mamba import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu

__all__ = ["assign_extend_cache_locs_cpu", "assign_req_to_token_pool_cpu"]

IS_CPU_FALLBACK = True
"""Tells this package from the real one."""


class MissingKernel:
    """A name that this fallback does not implement: importable, not callable."""

    def __init__(self, qualified_name: str) -> None:
        self._qualified_name = qualified_name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self._qualified_name} is not part of the CPU fallback of sgl_kernel: this model or "
            "option needs SGLang's own kernels (a CUDA machine, or a CPU build of sgl_kernel)"
        )

    def __repr__(self) -> str:
        return f"<missing kernel {self._qualified_name}>"


def _missing(module_name: str, name: str) -> MissingKernel:
    # Dunders are the import system's and inspect's questions: they need a true answer.
    if name.startswith("__"):
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
    return MissingKernel(f"{module_name}.{name}")


def __getattr__(name: str) -> MissingKernel:
    return _missing(__name__, name)


for _operator in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)

# SGLang's processor of pictures for Qwen imports a newer model, which looks these up at once.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    setattr(torch.ops.sgl_kernel, _name, _missing("torch.ops.sgl_kernel", _name))
