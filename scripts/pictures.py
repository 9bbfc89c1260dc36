"""Draws the pictures of the docs from data: a short simulated run, and the import contracts.

python scripts/pictures.py

The picture of a benchmark is drawn by the benchmark; page.png is a screenshot.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sglang_coserve.simulator.compare import compare
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
ONLINE, OFFLINE, LIMIT, LINE = "#0969da", "#bc4c00", "#cf222e", "#57606a"
CENTRE: Final[Mapping[str, Any]] = {"ha": "center", "va": "center"}
SIMULATED_S: Final = 20.0
NUM_STEPS: Final = 24
FEW: Final = 6
NEEDS_ENGINE: Final = ("srt", "guard", "launch_server", "bench_serving", "demo", "small_model")
"""Packages for the extra ``engine``."""

Event = Mapping[str, Any]


def main() -> None:
    """Write all pictures."""
    # No ids at random and no date: the same data give the same file.
    mpl.rcParams.update({"svg.hashsalt": "coserve", "font.size": 10, "svg.fonttype": "none"})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    large = SimulationOptions(
        model="llama-3.1-70b",
        tp_size=4,
        offline="6000x64",
        slo=["ttft p99 <= 200ms", "tbt p99 <= 60ms"],
        rate=0.3,
    )
    _, shared = simulated(large)
    draw_suspension(shared, "simulated: Llama-3.1-70B on four H100s")
    small = SimulationOptions(
        offline="4096x256", slo=["ttft p99 <= 200ms", "tbt p99 <= 25ms"], rate=8.0
    )
    alone, shared = simulated(small)
    draw_steps(shared, "simulated: Llama-3.1-8B on an H100")
    draw_bill(alone, shared, "simulated: 8B on an H100, up to 25 ms a token allowed")
    draw_layers()


def simulated(options: SimulationOptions) -> tuple[list[Event], list[Event]]:
    """Return what a modelled engine does with online requests alone, and with offline work."""
    options = replace(options, policy="online_only,coserve", backlog=64, duration=SIMULATED_S)
    with tempfile.TemporaryDirectory() as directory:
        with RunControl(show=False) as control:
            compare(options, Path(directory), control, event_log=True)
        logs = [
            Path(directory, f"events-{policy}.jsonl").read_text(encoding="utf-8")
            for policy in options.policy.split(",")
        ]
    alone, shared = ([json.loads(line) for line in log.splitlines()] for log in logs)
    return alone, shared


def draw_suspension(events: Sequence[Event], source: str) -> None:
    """Draw the engine's time around the last step that is suspended: who has it, who arrives."""
    steps = _steps(events)
    last = max(at for at, step in enumerate(steps) if step["is_suspended"])
    first = min(at for at in range(last - 3, last + 1) if steps[at]["is_suspended"])
    shown = steps[first : last + 4]
    first_s = shown[0]["start_s"]
    figure, axes = plt.subplots(figsize=(8.6, 2.2), layout="constrained")
    parts = shown[0]["prefills"]
    for step in shown:
        start_ms, end_ms = ((step[f"{at}_s"] - first_s) * 1e3 for at in ("start", "end"))
        is_part = step["is_suspended"] or step["prefills"] == parts
        parts = step["prefills"] if step["is_suspended"] else parts
        _bar(axes, step, start_ms, end_ms - start_ms, height=1.0)
        if is_part:
            begins = "begins" if step is shown[0] else "goes on"
            ends = "stops" if step["is_suspended"] else "ends"
            text = f"{begins},\n{ends}"
            axes.text((start_ms + end_ms) / 2, 0.7, text, color="white", size=9, **CENTRE)
    for event in events:
        if event["event"] == "arrived" and event["class"] == "online":
            at_ms = (event["t_s"] - first_s) * 1e3
            if 0 <= at_ms <= end_ms:
                arrow = {"arrowstyle": "->", "color": ONLINE}
                axes.annotate(
                    "an online request",
                    (at_ms, 1.0),
                    (at_ms, 1.3),
                    color=ONLINE,
                    ha="center",
                    arrowprops=arrow,
                )
    axes.legend(
        handles=[Patch(color=ONLINE, label="online"), Patch(color=OFFLINE, label="offline")],
        ncols=2,
        loc="upper right",
        frameon=False,
    )
    axes.set(xlim=(0, end_ms), ylim=(0, 1.6), yticks=[], xlabel=f"ms ({source})")
    axes.spines["left"].set_visible(False)
    _write(figure, "idea")


def draw_steps(events: Sequence[Event], source: str) -> None:
    """Draw some steps: how long each may take, and what fills it."""
    steps = [step for step in _steps(events) if step["budget_s"] and step["offline_tokens"]]
    first = max(
        range(len(steps) - NUM_STEPS),
        key=lambda at: sum(
            bool(step["online_tokens"] > 100) for step in steps[at : at + NUM_STEPS]
        ),
    )
    figure, axes = plt.subplots(figsize=(8.6, 2.8), layout="constrained")
    for place, step in enumerate(steps[first : first + NUM_STEPS]):
        allowed_ms, taken_ms = step["budget_s"] * 1e3, (step["end_s"] - step["start_s"]) * 1e3
        _bar(axes, step, place - 0.4, 0.8, height=taken_ms)
        axes.hlines(allowed_ms, place - 0.45, place + 0.45, color=LIMIT)
    handles = [
        Line2D([], [], color=LIMIT, label="when it must end"),
        Patch(color=OFFLINE, label="offline part of its tokens"),
        Patch(color=ONLINE, label="online part"),
    ]
    figure.legend(handles=handles, ncols=3, loc="outside upper center", frameon=False)
    axes.set(ylabel="ms", xlabel=f"steps, one after the other ({source})", xticks=[])
    _write(figure, "step")


def draw_bill(alone: Sequence[Event], shared: Sequence[Event], source: str) -> None:
    """Draw the request that offline work delays as much as the median one, with it and without."""
    times = [_times(events) for events in (alone, shared)]
    known = sorted(
        times[0].keys() & times[1].keys(), key=lambda one: times[1][one][-1] - times[0][one][-1]
    )
    rid = known[len(known) // 2]
    arrival_s = times[0][rid][0]
    figure, axes = plt.subplots(figsize=(8.6, 2.1), layout="constrained")
    ends_ms = []
    for height, name, color, of in (
        (1, "without offline work", LINE, alone),
        (0, "with it", ONLINE, shared),
    ):
        arrived_ms, first_ms, last_ms = ((at - arrival_s) * 1e3 for at in _times(of)[rid])
        axes.plot([arrived_ms, first_ms], [height, height], color=color)
        axes.barh(height, last_ms - first_ms, 0.4, left=first_ms, color=color)
        axes.text(first_ms, height + 0.27, name, color=color)
        ends_ms.append(last_ms)
    axes.axvspan(*ends_ms, color=LIMIT, alpha=0.15)
    axes.text(ends_ms[1], 1, f" the bill: {ends_ms[1] - ends_ms[0]:.0f} ms", va="center")
    axes.set(xlim=(0, ends_ms[1] * 1.25), ylim=(-0.4, 1.7), yticks=[])
    axes.set_xlabel(f"ms since it arrived; bars: first to last token ({source})")
    axes.spines["left"].set_visible(False)
    _write(figure, "bill")


def draw_layers() -> None:
    """Draw the packages as the import contracts layer them: each may import what is below."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["name"] == "Packages are layered")
    figure, axes = plt.subplots(figsize=(8.6, 3.8), layout="constrained")
    for height, layer in enumerate(reversed(layers)):
        names = [word.rpartition(".")[2] for word in layer.replace("|", ":").split(" : ")]
        width = 1 / len(names)
        for place, name in enumerate(names):
            color = OFFLINE if name in NEEDS_ENGINE else ONLINE
            axes.barh(height, width - 0.004, 0.84, left=place * width, align="center", color=color)
            size = 9 if len(names) < FEW else 7
            axes.text((place + 0.5) * width, height, name, color="white", size=size, **CENTRE)
    handles = [
        Patch(color=OFFLINE, label="needs the extra engine"),
        Patch(color=ONLINE, label="does not"),
    ]
    figure.legend(handles=handles, ncols=2, loc="outside upper center", frameon=False)
    axes.set(xlim=(0, 1), ylim=(-0.5, len(layers) - 0.5))
    axes.set_axis_off()
    _write(figure, "architecture")


def _steps(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "iteration"]


def _times(events: Sequence[Event]) -> dict[str, tuple[float, float, float]]:
    """Return when each finished online request arrived, and had its first and its last token."""
    at = {
        name: {event["rid"]: event for event in events if event["event"] == name}
        for name in ("arrived", "first_token", "finished")
    }
    return {
        rid: (arrived["arrival_s"], at["first_token"][rid]["t_s"], at["finished"][rid]["t_s"])
        for rid, arrived in at["arrived"].items()
        if arrived["class"] == "online" and rid in at["finished"]
    }


def _bar(axes: Any, step: Event, left: float, width: float, *, height: float) -> None:
    """Draw a step, its tokens' classes above each other."""
    online, offline = step["online_tokens"], step["offline_tokens"]
    share = online / max(1, online + offline) * height
    settings = {"align": "edge", "edgecolor": "white", "linewidth": 0.5}
    axes.bar(left, share, width, color=ONLINE, **settings)
    axes.bar(left, height - share, width, bottom=share, color=OFFLINE, **settings)


def _write(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
