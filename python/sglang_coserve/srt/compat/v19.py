"""What has changed with SGLang 0.5.19: settings as they were given are kept apart from those in
effect, a request always has a record of the KV it holds, and bench_serving a steady state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

__all__ = [
    "computed_tokens",
    "holds_kv",
    "model_config_of",
    "num_core_sets",
    "protected_tokens",
    "set_computed_tokens",
    "settings_of",
    "slot_of",
    "steady_state",
]

Req = Any


def settings_of(server_args: Any) -> Any:
    """As in ``v17``. The first call derives them, which reads the model's configuration."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    server_args.resolve_once()
    return resolving_view(server_args)


def model_config_of(server_args: Any) -> Any:
    """As in ``v17``."""
    from sglang.srt.arg_groups.model_override_base import model_config_of as of_sglang

    return of_sglang(server_args)


def num_core_sets(server_args: Any) -> int:
    """As in ``v17``; each is for one rank."""
    return int(server_args.dp_size * server_args.tp_size * server_args.pp_size)


def holds_kv(req: Req) -> bool:
    """As in ``v17``."""
    return bool(req.kv.holds_kv)


def slot_of(req: Req) -> Any:
    """As in ``v17``."""
    return req.kv.req_pool_idx


def computed_tokens(req: Req) -> int:
    """As in ``v17``."""
    return int(req.kv.kv_committed_len)


def set_computed_tokens(req: Req, tokens: int) -> None:
    """As in ``v17``."""
    req.kv.kv_committed_len = tokens


def protected_tokens(req: Req) -> int:
    """As in ``v17``."""
    return int(req.kv.cache_protected_len)


def steady_state(
    outputs: Sequence[Any],
    tokenizer: Any,
    concurrency_ratio: float,
    requests: Sequence[Any] | None,
) -> dict[str, Any] | None:
    """As in ``v17``; None where it finds none."""
    from sglang.benchmark.steady_state import calculate_steady_state_metrics

    try:
        found = calculate_steady_state_metrics(outputs, tokenizer, concurrency_ratio, requests)
    except ValueError:
        return None
    return asdict(found)
