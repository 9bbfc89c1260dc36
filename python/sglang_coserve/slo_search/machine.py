"""The modelled engine: the limits of a batch other than latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from sglang_coserve.errors import ServerError
from sglang_coserve.simulator import ExecutorConfig
from sglang_coserve.workload import RESERVED_TOKENS

__all__ = ["EngineMachine"]


@dataclass(frozen=True, slots=True)
class EngineMachine:
    """Limits of one SGLang engine; the defaults are SGLang's where these are fixed."""

    kv_capacity_tokens: int = 65536
    page_tokens: int = 1
    max_running: int = 256
    """Most requests that hold KV."""

    max_batch_tokens: int = 8192
    """Most prompt tokens of a step: SGLang's chunked prefill size."""

    max_context_tokens: int = 4096
    """Longest prompt plus output; longer online requests are cut."""

    overlap: bool = False
    """Whether the next step is planned while the current one runs."""

    @classmethod
    def at(cls, base_url: str) -> EngineMachine:
        """Ask a running server for its limits.

        Raises:
            ServerError: the server does not report them.
        """
        try:
            with httpx.Client(base_url=base_url, trust_env=False, timeout=60.0) as client:
                info, models = (
                    client.get(path).raise_for_status().json()
                    for path in ("/server_info", "/v1/models")
                )
        except httpx.HTTPError as error:
            raise ServerError(f"the server does not report its limits: {error}") from error
        return cls.of_server(info, models["data"][0])

    @classmethod
    def of_server(cls, info: Mapping[str, Any], model_card: Mapping[str, Any]) -> EngineMachine:
        """Read the limits of a running server.

        Args:
            info: Its ``/server_info``.
            model_card: The first entry of its ``/v1/models``.
        """
        state = info["internal_states"][0]
        return cls(
            kv_capacity_tokens=state["memory_usage"]["token_capacity"],
            page_tokens=info["page_size"],
            max_running=state["effective_max_running_requests_per_dp"],
            max_batch_tokens=max(info["chunked_prefill_size"] or 0, 0)
            or info["max_prefill_tokens"],
            max_context_tokens=model_card["max_model_len"] - RESERVED_TOKENS,
            overlap=not info["disable_overlap_schedule"],
        )

    def with_given(self, **limits: int | None) -> EngineMachine:
        """Return a copy with those limits replaced that are not None."""
        given: dict[str, Any] = {name: n for name, n in limits.items() if n is not None}
        return replace(self, **given)

    def __str__(self) -> str:
        return (
            f"{self.kv_capacity_tokens} KV tokens in pages of {self.page_tokens}, "
            f"{self.max_running} running, {self.max_batch_tokens} tokens a batch, "
            f"context {self.max_context_tokens}{', overlap' if self.overlap else ''}"
        )

    def to_dict(self) -> dict[str, int | bool]:
        """Return the fields by name."""
        return asdict(self)

    def executor_config(self, seed: int) -> ExecutorConfig:
        """Return the simulator's settings, without safepoints and checkpoints."""
        return ExecutorConfig(
            kv_capacity_tokens=self.kv_capacity_tokens,
            page_tokens=self.page_tokens,
            max_running_requests=self.max_running,
            max_batch_tokens=self.max_batch_tokens,
            overlap=self.overlap,
            seed=seed,
        )
