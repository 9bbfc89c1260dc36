"""When engines of a fleet are away."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple, Self

from sglang_coserve.errors import ConfigError

__all__ = ["Outage"]

_FORM: Final = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?", re.ASCII)


class Outage(NamedTuple):
    """An engine takes nothing for a while."""

    start_s: float
    engine: int
    end_s: float
    is_death: bool
    """True when what it has is gone; otherwise it drains: its online requests end there."""

    @classmethod
    def parse(cls, text: str, *, is_death: bool) -> Self:
        """Read ``ENGINE@START+SECONDS``; without the seconds it is for good.

        Raises:
            ConfigError: it is something else.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(f"outage {text!r}: use ENGINE@START+SECONDS, such as 0@30+60")
        start_s = float(match[2])
        end_s = math.inf if match[3] is None else start_s + float(match[3])
        return cls(start_s, int(match[1]), end_s, is_death)
