"""What has changed with SGLang 0.5.19: a request always has a record of the KV it holds."""

from __future__ import annotations

from typing import Any

__all__ = ["computed_tokens", "holds_kv", "set_computed_tokens", "slot_of"]

Req = Any


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
