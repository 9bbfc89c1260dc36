"""Settings of the modelled engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.ranges import NOT_NEGATIVE, POSITIVE, check_ranges
from sglang_coserve.core.snapshot import FINE_CHUNKS, ChunkRules
from sglang_coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SafepointConfig:
    """Checks between layers at which a step of the offline lane can be suspended.

    In ConServe (§4.3) the step's work is lost; here the step is resumed later.

    Raises:
        ConfigError: a value is out of range.
    """

    num_layers: Annotated[int, POSITIVE]
    interval_layers: Annotated[int, POSITIVE] = 4
    """Number of layers between checks; ConServe §6.5 uses 4."""

    check_s: Annotated[float, NOT_NEGATIVE] = 10e-6
    """Cost of one check; ConServe §6.5 states less than 10 µs on one GPU."""

    resume_s: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Cost of suspending and resuming a step, as measured with a prototype on a CPU."""

    def __post_init__(self) -> None:
        check_ranges(self, "simulator: {} of safepoints".format)

    @property
    def checks_per_iteration(self) -> int:
        """Checks in one step; there is none after the last layer."""
        return (self.num_layers - 1) // self.interval_layers

    @property
    def stop_share(self) -> float:
        """Largest share of a step that runs until its next safepoint or its end."""
        return min(1.0, self.interval_layers / self.num_layers)


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Memory, limits and imperfections of the modelled engine.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    kv_capacity_tokens: int
    page_tokens: Annotated[int, POSITIVE] = 16
    """KV is allocated in pages of this many tokens."""

    max_running_requests: Annotated[int, POSITIVE] = 256
    """Most requests that hold KV at once."""

    max_batch_tokens: int = 8192
    """Most tokens computed in one step."""

    prefix_cache: bool = True
    """False: KV is never shared, and a retracted request keeps none on the device."""

    checkpoint_tokens_per_s: Annotated[float, NOT_NEGATIVE] = 0.0
    """KV tokens per second that are copied to host memory, and back (ConServe §4.4; §6.5 measured
    37 GB/s from one H100); 0: KV released on the device must be computed again."""

    safepoint: SafepointConfig | None = None
    """Safepoints; None: a step always runs to its end."""

    overlap: bool = False
    """Whether the next step is planned while the current one runs, as with SGLang's overlap
    scheduling: an arrival is noticed one step later, and a request that ends computes one token
    too many."""

    paced: bool = False
    """With ``overlap``: whether the step after one with offline work is planned as that ends, as
    our engine does."""

    noise_cv: Annotated[float, NOT_NEGATIVE] = 0.0
    """Coefficient of variation of step times around the latency model."""

    seed: int = 0
    """Seed of the noise."""

    chunk_rules: ChunkRules = FINE_CHUNKS
    """The pieces in which prompts are computed."""

    def __post_init__(self) -> None:
        check_ranges(self, "simulator: {}".format)
        # Chunks end at page boundaries, so a smaller batch would never make progress.
        for name in ("kv_capacity_tokens", "max_batch_tokens"):
            if (tokens := getattr(self, name)) < self.page_tokens:
                raise ConfigError(
                    f"simulator: {name} is {tokens}: it must be at least one page of "
                    f"{self.page_tokens} tokens"
                )
        piece_tokens = math.lcm(self.chunk_rules.align_tokens, self.page_tokens)
        if self.max_batch_tokens < piece_tokens:
            raise ConfigError(
                f"simulator: max_batch_tokens is {self.max_batch_tokens}: it must be at least one "
                f"piece of {piece_tokens} tokens (chunk_rules, page_tokens)"
            )

    @property
    def engine_size(self) -> EngineSize:
        """The limits that the no-interference baseline has, too."""
        return EngineSize(
            chunk_tokens=self.max_batch_tokens,
            max_requests=self.max_running_requests,
            kv_tokens=self.kv_capacity_tokens,
            page_tokens=self.page_tokens,
            keeps_prefixes=self.prefix_cache,
            overlaps=self.overlap,
        )
