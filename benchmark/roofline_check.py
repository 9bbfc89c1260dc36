"""Published step times against the roofline of the datasheet, in Markdown.

    python benchmark/roofline_check.py

Three tables: median and worst ratios for each device and phase, every time, and the sources. Beside
the roofline as it is stands one with three changes, which show where its errors come from; they
were chosen on the same times. docs/latency_model.md has the tables, and what follows from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from common.results import markdown_table
from roofline_bench.published import PUBLISHED, SOURCES, Published
from sglang_coserve.core.latency_model import LatencyModel, RooflineModel, find_hardware
from sglang_coserve.core.latency_model.known_models import find_model
from sglang_coserve.core.step_stats import StepStats

H100_MEMORY: Final = 0.7
"""Share of an H100's peak bandwidth that is reached, instead of 0.8."""

GROUPED_KV_MEMORY: Final = 0.4
"""Share of any peak bandwidth that attention with grouped heads reaches, instead of 0.8."""

ALL_REDUCE_S: Final = 25e-6
"""Of each all-reduce, however small; the roofline has only its bytes."""


def main() -> None:
    """Print the tables."""
    print("\n\n".join((summary_table(), times_table(), sources_table())))


def datasheet_model(row: Published) -> RooflineModel:
    """Return the roofline as it is."""
    return RooflineModel.from_datasheet(
        find_model(row.model), find_hardware(row.hardware), tp_size=row.tp_size
    )


def changed_model(row: Published) -> RooflineModel:
    """Return the roofline with the three changes."""
    model = datasheet_model(row)
    shape, peak_byte_per_s = model.shape, model.hardware.memory_byte_per_s
    values = {}
    if row.hardware == "h100":
        values["gemm_byte_s"] = values["attention_byte_s"] = 1 / (H100_MEMORY * peak_byte_per_s)
    if shape.num_kv_heads < shape.num_query_heads:
        values["attention_byte_s"] = 1 / (GROUPED_KV_MEMORY * peak_byte_per_s)
    if row.tp_size > 1:
        all_reduces_s = 2 * shape.num_layers * ALL_REDUCE_S
        values["prefill_step_s"] = model.prefill_step_s + all_reduces_s
        values["decode_step_s"] = model.decode_step_s + all_reduces_s
    return model.with_coefficients(values)


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
    columns += ["median", "lowest", "highest", "changed: median", "lowest", "highest"]
    groups: dict[tuple[str, ...], list[Published]] = {}
    for row in PUBLISHED:
        if not row.is_calibration:
            devices = "one" if row.tp_size == 1 else "several"
            groups.setdefault((row.hardware, phase_of(row), devices), []).append(row)
    lines = [
        [*group, str(len(rows)), *spread(rows, changed=False), *spread(rows, changed=True)]
        for group, rows in groups.items()
    ]
    return markdown_table(columns, lines)


def spread(rows: Sequence[Published], *, changed: bool) -> Iterable[str]:
    """Return the median, lowest and highest ratio."""
    model_of = changed_model if changed else datasheet_model
    ratios = [predicted_ms(row, model_of(row)) / row.measured_ms for row in rows]
    return (f"{value:.2f}" for value in (statistics.median(ratios), min(ratios), max(ratios)))


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
