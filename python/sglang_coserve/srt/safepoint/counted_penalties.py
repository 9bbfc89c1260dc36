"""Keeps penalties from counting the last token twice when a dropped decode step is repeated."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CountedPenalties"]

ScheduleBatch = Any

_Rows = dict[tuple[type, str], torch.Tensor]


class CountedPenalties:
    """Keeps the penalty counts of decodes whose step was dropped.

    SGLang counts a request's last token when it prepares a step, and a dropped step is
    prepared again. So the counts after the first preparation are kept, and restored
    after the second.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Rows] = {}

    def __len__(self) -> int:
        """Return the number of requests whose counts are kept."""
        return len(self._rows)

    def keep(self, batch: ScheduleBatch) -> None:
        """Keep the counts of a rolled-back batch's decodes. O(requests) if it has penalties."""
        penalties = batch.sampling_info.penalizer_orchestrator
        if not batch.reqs or not penalties.is_required:
            return
        tensors = [
            ((kind, name), value)
            for kind, penalizer in penalties.penalizers.items()
            # Each penalizer keeps tensors with a row per request, as its filter shows.
            for name, value in vars(penalizer).items()
            if isinstance(value, torch.Tensor)
        ]
        for row, req in enumerate(batch.reqs):
            if not req.finished():
                self._rows[req.rid] = {key: value[row].clone() for key, value in tensors}

    def put_back(self, batch: ScheduleBatch) -> None:
        """Restore the counts kept for the requests of a prepared batch.

        The counts of a request that prefills, as it was retracted since, are discarded.
        """
        if not self._rows:
            return
        num_prefills = 0
        if not batch.forward_mode.is_decode():
            num_prefills = len(batch.reqs) - len(batch.decoding_reqs or ())
        penalties = batch.sampling_info.penalizer_orchestrator
        for row, req in enumerate(batch.reqs):
            kept = self._rows.pop(req.rid, None)
            if kept is None or row < num_prefills:
                continue
            for (kind, name), value in kept.items():
                penalizer = penalties.penalizers.get(kind)
                # The requests that asked for this penalty may have left the batch.
                if penalizer is not None and penalizer.is_prepared():
                    getattr(penalizer, name)[row] = value

    def forget(self, rid: str) -> None:
        """Discard the counts of a request that has ended."""
        self._rows.pop(rid, None)
