"""Published step times against the roofline of the datasheet, in Markdown.

    python benchmark/roofline_check.py

Four tables: median and worst ratios for each device and phase, the same coefficients chosen without
each of the sources, every time, and the sources. Beside the roofline as it is stands the plain one:
0.8 of the peak bandwidth for everything, and all-reduces that cost their bytes alone.
benchmark/results/roofline_check.md has all but the third, docs/latency_model.md what follows.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from roofline_bench.published import PUBLISHED, SOURCES, Published
from sglang_coserve.core.latency_model import LatencyModel, RooflineModel, find_hardware
from sglang_coserve.core.latency_model.model_shape import find_model
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.tables import markdown_table

ModelOf = Callable[[Published], LatencyModel]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen by these times."""

    hopper_memory: float
    """Share of its peak bandwidth that an H100 or H200 reaches; 0.8 on other devices."""

    grouped_kv_memory: float
    """Share of any peak bandwidth that attention with grouped heads reaches."""

    all_reduce_s: float
    """Of each one, beside its bytes."""

    def of(self, row: Published) -> LatencyModel:
        """Return the roofline with it."""
        model = datasheet_model(row)
        shape, hardware = model.shape, model.hardware
        share = self.hopper_memory if row.hardware in ("h100", "h200") else OTHER_MEMORY
        is_grouped = shape.num_kv_heads < shape.num_query_heads
        # The one H200 that was measured reads KV with a later engine, as fast as weights.
        is_slow = is_grouped and row.hardware != "h200"
        kv_share = min(share, self.grouped_kv_memory) if is_slow else share
        all_reduces = 2 * shape.num_layers if row.tp_size > 1 else 0
        step_s = OTHER_STEP_S + all_reduces * self.all_reduce_s
        values = {
            "gemm_byte_s": 1 / (share * hardware.memory_byte_per_s),
            "attention_byte_s": 1 / (kv_share * hardware.memory_byte_per_s),
            "prefill_step_s": step_s,
            "decode_step_s": step_s,
        }
        return model.with_coefficients(values)


OTHER_MEMORY: Final = 0.8
OTHER_STEP_S: Final = 1e-3
PLAIN: Final = Choice(OTHER_MEMORY, OTHER_MEMORY, 0.0)
CHOICES: Final = tuple(
    Choice(memory, kv_memory, all_reduce_us / 1e6)
    for memory in (0.6, 0.65, 0.7, 0.75, 0.8)
    for kv_memory in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    for all_reduce_us in (0, 10, 15, 20, 25, 30, 40)
)


def main() -> None:
    """Print the tables."""
    print("\n\n".join((summary_table(), held_out_table(), times_table(), sources_table())))


def datasheet_model(row: Published) -> RooflineModel:
    """Return the roofline as it is."""
    return RooflineModel.from_datasheet(
        find_model(row.model), find_hardware(row.hardware), tp_size=row.tp_size
    )


def predicted_ms(row: Published, model: LatencyModel) -> float:
    """Return what the model says the row's time is.

    A decode has the mean context of its outputs, as decodes are linear in their context.
    """
    prompt = (row.prompt_tokens, row.context_tokens)
    prefill_s = model.predict(StepStats.of([prompt] * row.requests))
    if row.output_tokens == 1:
        return 1e3 * prefill_s
    context_tokens = sum(prompt) + row.output_tokens // 2
    decode_s = model.predict(StepStats.of(decodes=[context_tokens] * row.requests))
    if not row.is_with_prefill:
        return 1e3 * decode_s
    return 1e3 * (prefill_s + (row.output_tokens - 1) * decode_s) / row.output_tokens


def summary_table() -> str:
    """Return the median and worst ratios, predicted ÷ published, of each group."""
    columns = ["device", "phase", "devices", "times"]
    columns += ["median", "lowest", "highest", "plain: median", "lowest", "highest"]
    groups: dict[tuple[str, ...], list[Published]] = {}
    for row in PUBLISHED:
        if not row.is_calibration:
            devices = "one" if row.tp_size == 1 else "several"
            groups.setdefault((row.hardware, phase_of(row), devices), []).append(row)
    lines = [
        [*group, str(len(rows)), *spread(rows, datasheet_model), *spread(rows, PLAIN.of)]
        for group, rows in groups.items()
    ]
    return markdown_table(columns, lines)


def spread(rows: Sequence[Published], model_of: ModelOf) -> Iterable[str]:
    """Return the median, lowest and highest ratio."""
    ratios = [predicted_ms(row, model_of(row)) / row.measured_ms for row in rows]
    return (f"{value:.2f}" for value in (statistics.median(ratios), min(ratios), max(ratios)))


def held_out_table() -> str:
    """Return how well decodes of a source are predicted by what the other sources would choose."""
    columns = ["source", "times", "plain", "chosen by the others", "as it is"]
    columns += ["Hopper memory", "grouped heads", "all-reduce, µs"]
    decodes = [row for row in PUBLISHED if phase_of(row) == "decode"]
    errors = {choice: [error(row, choice.of) for row in decodes] for choice in CHOICES}
    lines = []
    for source in dict.fromkeys(row.source for row in decodes):
        is_own = [row.source == source for row in decodes]

        def of_others(choice: Choice, is_own: Sequence[bool] = is_own) -> float:
            return sum(compress(errors[choice], map(operator.not_, is_own)))

        chosen = min(CHOICES, key=of_others)
        own = list(compress(decodes, is_own))
        means = [
            f"{100 * statistics.mean(error(row, model_of) for row in own):.0f}%"
            for model_of in (PLAIN.of, chosen.of, datasheet_model)
        ]
        values = [f"{chosen.hopper_memory:g}", f"{chosen.grouped_kv_memory:g}"]
        lines.append([source, str(len(own)), *means, *values, f"{1e6 * chosen.all_reduce_s:.0f}"])
    return markdown_table(columns, lines)


def error(row: Published, model_of: ModelOf) -> float:
    """Return by what share the prediction is off, alike in both directions."""
    return abs(math.log(predicted_ms(row, model_of(row)) / row.measured_ms))


def times_table() -> str:
    """Return every time beside its prediction."""
    columns = ["step", "device", "model", "published, ms", "predicted, ms", "ratio", "source"]
    lines = []
    for row in PUBLISHED:
        predicted = predicted_ms(row, datasheet_model(row))
        devices = row.hardware if row.tp_size == 1 else f"{row.tp_size} × {row.hardware}"
        times = [f"{row.measured_ms:.1f}", f"{predicted:.1f}", f"{predicted / row.measured_ms:.2f}"]
        lines.append([step_of(row), devices, row.model, *times, row.source])
    return markdown_table(columns, lines)


def phase_of(row: Published) -> str:
    """Return the kind of step, as the tables call it."""
    if row.output_tokens == 1:
        return "prefill"
    return "decode" if row.has_cuda_graphs else "decode without CUDA graphs"


def step_of(row: Published) -> str:
    """Return a few words of the batch."""
    words = f"{phase_of(row)}, {row.requests} × {row.prompt_tokens:,}"
    if row.context_tokens:
        words += f" after {row.context_tokens:,}"
    if row.output_tokens > 1:
        words += f" + {row.output_tokens:,}"
    return words + (", prefill spread over it" if row.is_with_prefill else "")


def sources_table() -> str:
    """Return where the times were published, and how one is derived."""
    lines = [
        [name, f"[{source.title}]({source.url})", source.engine, source.how]
        for name, source in SOURCES.items()
    ]
    return markdown_table(["source", "where", "engine", "time"], lines)


if __name__ == "__main__":
    main()
