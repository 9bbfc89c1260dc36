"""Traces whose arrivals are the bundled sample's and whose lengths are a real trace's on average.

The sample is made for a small model on a CPU. Its order of arrivals and the spread of its
lengths are kept, so these are slices *like* Azure's and BurstGPT's, not of them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

from sglang_coserve.workload import TraceRequest, read_trace, sample_path

__all__ = ["SLICES", "TraceLike", "write_slice"]


@dataclass(frozen=True, slots=True)
class TraceLike:
    """What the sample is brought to."""

    mean_prompt_tokens: float
    mean_output_tokens: float
    gap_power: float = 1.0
    """Gaps between arrivals are raised to it: above 1 they are more uneven."""


SLICES: Final = {
    # Azure LLM inference trace 2023, conversations.
    "azure": TraceLike(1155, 211),
    # Table 1 of ConServe; BurstGPT's arrivals come in bursts.
    "burstgpt": TraceLike(2747, 267, gap_power=1.5),
}


def write_slice(path: Path, like: TraceLike) -> Path:
    """Write the trace in Azure's format; return ``path``."""
    requests = [r for r in read_trace(sample_path("online")) if r.prompt_tokens and r.output_tokens]
    prompt_factor = like.mean_prompt_tokens / fmean(r.prompt_tokens for r in requests)
    output_factor = like.mean_output_tokens / fmean(r.output_tokens for r in requests)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for request in _uneven(requests, like.gap_power):
            minutes, seconds = divmod(request.arrival_s, 60)
            hours, minutes = divmod(int(minutes), 60)
            rows.writerow(
                [
                    f"2026-01-01 {hours:02}:{minutes:02}:{seconds:010.7f}",
                    max(1, round(request.prompt_tokens * prompt_factor)),
                    max(1, round(request.output_tokens * output_factor)),
                ]
            )
    return path


def _uneven(requests: Sequence[TraceRequest], power: float) -> list[TraceRequest]:
    """Raise the gaps to a power, in the same time altogether."""
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(requests)]
    raised = [gap**power for gap in gaps]
    factor = sum(gaps) / sum(raised)
    arrivals_s = accumulate((gap * factor for gap in raised), initial=0.0)
    return [replace(r, arrival_s=at) for r, at in zip(requests, arrivals_s, strict=True)]
