"""Parts that a gateway can do without, one line for each."""

from __future__ import annotations

from typing import Final

from sglang_coserve.fleet.line_placement.line_moves import LineMoves
from sglang_coserve.fleet.pools.line_pools import LinePools

LINE_MOVES: Final[type[LineMoves]] = LinePools
"""With ``LineMoves`` lines end in the engine where they began, unless the engine gives them up."""
