"""Keeps SGLang from compiling parts of sampling while requests wait.

SGLang marks two small functions for ``torch.compile``, which compiles them on
first use: with the first request that has a ``repetition_penalty`` (and again
for the first batch of two requests, and for other types), or a seed.  That took 23 s on
four idle cores, during which the scheduler does nothing else.  Without compilation they
only read the logits a few more times.
"""

from __future__ import annotations

from typing import Any

from sglang_coserve.srt import compat

__all__ = ["install_eager_sampling"]


def install_eager_sampling() -> None:
    """Make SGLang in this process call the uncompiled functions."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.penaltylib import repetition_penalty

    penalties = _as_written(repetition_penalty.apply_scaling_penalties)
    compat.replace(
        "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties", penalties
    )
    # Where it is imported to.
    compat.replace("sglang.srt.sampling.sampling_batch_info.apply_scaling_penalties", penalties)
    compat.replace(
        "sglang.srt.layers.sampler.multinomial_with_seed",
        _as_written(sampler.multinomial_with_seed),
    )


def _as_written(function: Any) -> Any:
    """Return the function behind ``torch.compile``; the function itself if there is none."""
    return getattr(function, "_torchdynamo_orig_callable", function)
