"""Plans that are made without the core: SGLang serves online requests, and offline ones wait.

SGLang goes by its own rules alone, as for a server without offline requests. Offline requests that
decode go on, as SGLang decodes every request of its running batch. Paused, parked and suspended
ones stay where they are, and give way where an online request lacks their memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_coserve.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class OnlineOnly(StepPlan):
    """A plan that leaves it to SGLang which online requests are admitted; see the module."""

    puts_back: bool = False
    """Before that, every request is put back in its place."""

    retracts_offline: bool = False
    """Before that, offline requests release their KV and wait."""


BY_SGLANG_RULES: Final = OnlineOnly()
"""SGLang has a rule that plans do not know (``Executed.leaves_online``)."""

AFTER_FAILURE: Final = OnlineOnly(puts_back=True)
"""A plan could not be made, or was not carried out to the end."""

WHILE_STOPPED: Final = OnlineOnly(retracts_offline=True)
"""Offline work has stopped."""
