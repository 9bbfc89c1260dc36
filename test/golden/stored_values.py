"""Behaviour and names that are stored in ``values.json``.

``python test/golden/stored_values.py`` writes the file anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from golden import formats
from golden.simulated_plans import SIMULATIONS, plans_of

FILE: Final = Path(__file__).with_name("values.json")

COMPUTED: Final[Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {
        **{
            f"plans: {name}": partial(plans_of, simulation)
            for name, simulation in SIMULATIONS.items()
        },
        "columns of the batch store": formats.tables,
        "fields of the batch store": formats.stored_fields,
        "fields of the Batch API": formats.json_fields,
        "parameters of the Batch API": formats.parameters,
        "records of lines": formats.records,
        "headers": formats.headers,
        "arguments of commands": formats.commands,
    }
)
"""Functions by the names of the values that they compute."""


def stored() -> dict[str, Any]:
    """Return the stored values by name."""
    values: dict[str, Any] = json.loads(FILE.read_text())
    return values


if __name__ == "__main__":
    values = {name: compute() for name, compute in COMPUTED.items()}
    FILE.write_text(json.dumps(values, indent=1) + "\n")
