"""The matrix products of a model's layers under the real safepoints, nothing of SGLang's engine."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sglang_coserve.srt.safepoint.gates import LeaderGate, PreemptionFlag, device_events
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, add_safepoints

__all__ = [
    "DecoderLayer",
    "Stack",
    "decoder_layers",
    "device_ms",
    "safepoint_us",
    "stop_delays_ms",
]


class DecoderLayer(nn.Module):  # type: ignore[misc]
    """The matrix products of a layer, without attention and norms."""

    def __init__(self, hidden: int, intermediate: int, kv_width: int) -> None:
        super().__init__()
        shapes = (
            (hidden, hidden + 2 * kv_width),
            (hidden, hidden),
            (hidden, 2 * intermediate),
            (intermediate, hidden),
        )
        self.weights = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[0] ** -0.5)
            for shape in shapes
        ]
        self.hidden, self.intermediate = hidden, intermediate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next layer takes."""
        qkv, out, gate_up, down = self.weights
        x = x + (x @ qkv)[:, : self.hidden] @ out
        gate, up = (x @ gate_up).split(self.intermediate, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ down
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def decoder_layers(model_path: Path) -> list[DecoderLayer]:
    """Make the layers of the model, as its configuration gives them."""
    config = json.loads((model_path / "config.json").read_text())
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_width = config.get("num_key_value_heads", heads) * head_dim
    return [
        DecoderLayer(config["hidden_size"], config["intermediate_size"], kv_width)
        for _ in range(config["num_hidden_layers"])
    ]


class Stack:
    """Layers with safepoints; depth None leaves them out."""

    def __init__(self, layers: Sequence[DecoderLayer], interval: int, depth: int | None) -> None:
        self.layers = layers
        self.flag = PreemptionFlag(pinned=True)
        self.gate = None
        if depth is not None:
            self.gate = LeaderGate(self.flag, device_events("cuda", depth))
            add_safepoints(layers, interval, self.gate)

    def close(self) -> None:
        """Take the safepoints out of the layers again."""
        for layer in self.layers:
            if "forward" in vars(layer):
                del layer.forward

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run(self, x: torch.Tensor, batch: int) -> None:
        """Launch an armed pass."""
        if self.gate is not None:
            self.gate.arm(batch)
        try:
            for layer in self.layers:
                x = layer(x)
        finally:
            if self.gate is not None:
                self.gate.disarm()

    def pass_ms(self, x: torch.Tensor, repeats: int) -> float:
        """Return the device's median time for a pass; the host waits for the end of each."""
        return device_ms(lambda batch: self.run(x, batch), range(1, repeats + 4), skipped=3)

    def delays_ms(self, x: torch.Tensor, pass_ms: float, repeats: int) -> list[float]:
        """Return times from the flag until the device is free, flags raised at random."""
        batches = range(1, repeats + 1)
        return stop_delays_ms(self.flag, lambda batch: self.run(x, batch), batches, pass_ms)


def device_ms(
    run: Callable[[int], object],
    batches: range,
    *,
    skipped: int,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return the device's median time for a run, without the first ones.

    ``before`` is called before each; the host waits for the end of each.
    """
    times = []
    for batch in batches:
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(batch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times[skipped:]))


def stop_delays_ms(
    flag: PreemptionFlag, run: Callable[[int], object], batches: range, run_ms: float
) -> list[float]:
    """Return times from a flag raised at random within a run until the device is free."""
    rng, delays = random.Random(0), []
    for batch in batches:
        flag.lower()
        raised = _raise_after(flag, rng.uniform(0.0, run_ms * 1e-3), batch)
        try:
            run(batch)
        except ForwardPreempted:
            torch.cuda.synchronize()
            delays.append((time.perf_counter() - raised()) * 1e3)
        else:
            torch.cuda.synchronize()
            raised()
    flag.lower()
    return delays


def _raise_after(flag: PreemptionFlag, delay_s: float, batch: int) -> Callable[[], float]:
    """Raise the flag from another thread; the returned function waits, and says when."""
    times: list[float] = []

    def arrive() -> None:
        time.sleep(delay_s)
        times.append(time.perf_counter())
        flag.raise_for(batch)

    thread = threading.Thread(target=arrive)
    thread.start()

    def raised_s() -> float:
        thread.join()
        return times[0]

    return raised_s


def safepoint_us(calls: int = 5000) -> float:
    """Return how long the host is kept at a safepoint of an armed batch that need not wait."""
    flag = PreemptionFlag(pinned=True)
    gate = LeaderGate(flag, device_events("cuda", 1))
    gate.arm(1)
    times = []
    for number in range(calls):
        start_s = time.perf_counter()
        gate.reached(number)
        times.append(time.perf_counter() - start_s)
        if number % 16 == 0:
            torch.cuda.synchronize()
    return float(np.median(times)) * 1e6
