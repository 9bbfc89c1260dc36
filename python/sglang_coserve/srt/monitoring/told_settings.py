"""Tells a server's settings without what may be a secret.

Numbers, switches and a flag's choices are told. Any other text may hold a key, a password, or an
address with a password, and is told only under the names listed here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

STARS: Final = "***"

_TOLD: Final = frozenset(
    {
        # What clients, routers and benchmarks ask for.
        *("model_path", "tokenizer_path", "served_model_name", "revision", "weight_version"),
        *("model_impl", "device", "host", "fastapi_root_path", "log_level", "log_level_http"),
        *("speculative_algorithm", "cuda_graph_config"),
        # What SGLang and co-serving add to settings.
        *(
            "coserve",
            "kv_events",
            "version",
            "frontend",
            "status",
            "memory_usage",
            "step_time_dict",
        ),
        "hicache_object_layout",
    }
)
"""Names of values that are told with all their text."""


def told(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their names, with stars for text that may be a secret."""
    return {name: _told(name, value) for name, value in answer.items()}


def _told(name: str, value: Any) -> Any:
    if not value or isinstance(value, bool | int | float) or name in _TOLD:
        return value
    if isinstance(value, Mapping):
        return told(value)
    if isinstance(value, list | tuple):
        return [_told(name, each) for each in value]
    choices = _choices().get(name)
    return value if choices is not None and value in choices else STARS


@cache
def _choices() -> Mapping[str, frozenset[Any]]:
    """Return the values from which the flags of SGLang take one, by the flag's field."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return {
        action.dest: frozenset(action.choices)
        for action in parser._actions
        if action.choices is not None
    }
