"""What a forward pass is: the kind of its batch, the sums over its requests, and its device."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import torch

from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.marks.request_marks import is_offline

Req = Any
ScheduleBatch = Any


class ForwardKind(Enum):
    """The kind of a batch: prefills, decodes, or both."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"


def kind_of(batch: ScheduleBatch) -> ForwardKind | None:
    """Return the kind of a batch; None for anything but plain prefills and decodes."""
    mode = batch.forward_mode
    if mode.is_decode():
        return ForwardKind.DECODE
    if mode.is_mixed():
        return ForwardKind.MIXED
    return ForwardKind.EXTEND if mode.is_extend_without_speculative() else None


def num_decodes(batch: ScheduleBatch, kind: ForwardKind) -> int:
    """Return the number of decodes in a batch; they are the last of its requests."""
    if kind is ForwardKind.EXTEND:
        return 0
    return len(batch.reqs) if kind is ForwardKind.DECODE else len(batch.decoding_reqs)


def prefilled(batch: ScheduleBatch) -> Sequence[Req]:
    """Return the requests of which a batch computes prompts; decodes may run beside them."""
    reqs: Sequence[Req] = batch.reqs
    return reqs[: len(reqs) - len(batch.decoding_reqs or ())]


def has_online_prompts(batch: ScheduleBatch) -> bool:
    """Return whether a batch computes prompts of online requests. O(its prompts)."""
    return batch.forward_mode.is_extend() and not all(map(is_offline, prefilled(batch)))


def stats_of(batch: ScheduleBatch, kind: ForwardKind) -> StepStats:
    """Return the sums over the requests of a prepared batch. O(requests)."""
    decodes = num_decodes(batch, kind)
    num_prefills = len(batch.reqs) - decodes
    # A batch of decodes may have none of these lists.
    prefills = [(batch.extend_lens[n], batch.prefix_lens[n]) for n in range(num_prefills)]
    # The length of a decode includes the token that it computes: C + 1.
    return StepStats.of(prefills)._replace(
        decode_requests=decodes,
        decode_context_tokens=int(batch.seq_lens_cpu[num_prefills:].sum()) if decodes else 0,
    )


EMULATED: Final = "coserve_emulated_device"
"""Attribute of ``torch.cpu`` with the device that is emulated, where one is."""


def is_emulated() -> bool:
    """Return whether the device of this process is an emulated one, which torch takes for a CPU."""
    return getattr(torch.cpu, EMULATED, None) is not None


def runs_beside_host(device: str) -> bool:
    """Return whether the host goes on while the device computes what it has launched."""
    return device != "cpu" or is_emulated()


def runs_ahead(scheduler: Any) -> bool:
    """Return whether a scheduler's host launches a step before it has the results of the last."""
    return bool(scheduler.enable_overlap) and runs_beside_host(scheduler.device)
