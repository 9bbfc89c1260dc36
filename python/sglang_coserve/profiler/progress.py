"""Shows the progress of profiling, and turns Ctrl-C into a stop after the current shape."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_coserve.profiler.latency import ShapeTiming
from sglang_coserve.terminal import StoppableBar


class ProfileProgress(StoppableBar):
    """A bar that shows the shapes done, or the time if that ends first."""

    def __init__(
        self,
        num_shapes: int,
        time_limit_s: float,
        *,
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``show``: on standard error, a bar on a terminal and otherwise occasional lines."""
        super().__init__("profiling", total=1.0, show=show, clock=clock)
        self._num_shapes = num_shapes
        self._time_limit_s = time_limit_s
        self._start_s = clock()
        self._num_measured = 0

    def advance(self, measurement: ShapeTiming) -> None:
        """Show one more measurement."""
        self._num_measured += 1
        of_time = (self._clock() - self._start_s) / self._time_limit_s
        of_shapes = self._num_measured / max(1, self._num_shapes)
        done = min(1.0, max(of_time, of_shapes))
        batch = measurement.shape.stats
        text = (
            f"{self._num_measured} measured; P {batch.prefill_tokens} × "
            f"{batch.prefill_requests}, decodes {batch.decode_requests}: "
            f"{measurement.seconds * 1e3:,.1f} ms"
        )
        self._show(done, lambda: f"profiling: {done:.0%}, {text}", text=text)
