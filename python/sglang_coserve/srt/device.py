"""What the device of the forward passes is like, whatever its name."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["EMULATED", "is_emulated", "runs_beside_host"]

EMULATED: Final = "coserve_emulated_device"
"""Attribute of ``torch.cpu`` with the device that is emulated, where one is."""


def is_emulated() -> bool:
    """Return whether the device of this process is an emulated one, which torch takes for a CPU."""
    return getattr(torch.cpu, EMULATED, None) is not None


def runs_beside_host(device: str) -> bool:
    """Return whether the host goes on while the device computes what it has launched."""
    return device != "cpu" or is_emulated()
