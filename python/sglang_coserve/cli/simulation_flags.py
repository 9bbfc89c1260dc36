"""Flags that ``coserve simulate`` and ``simulate fleet`` have in common."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Hardware", "Model", "Quiet", "Rate", "SloTpotMs", "SloTtftMs", "TimeLimit"]

Hardware = Annotated[str, typer.Option(help="a100, h100, h200, b200 or ascend-910c.")]
Model = Annotated[str, typer.Option(help="A known name such as llama-3.1-70b, or a config.json.")]
SloTtftMs = Annotated[
    float | None,
    typer.Option("--slo-ttft-ms", "--slo-ttft-p99-ms", help="Target for the time to first token."),
]
SloTpotMs = Annotated[
    float | None,
    typer.Option(
        "--slo-tpot-ms", "--slo-tpot-p99-ms", help="Target for the time per output token."
    ),
]
Rate = Annotated[float, typer.Option(help="Factor of the online arrival rate.")]
TimeLimit = Annotated[
    float, typer.Option(metavar="S", help="Real seconds after which to report what there is.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
