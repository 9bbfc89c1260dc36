"""The flags of every command that calls a server."""

from __future__ import annotations

from typing import Annotated, Final

import typer

__all__ = ["DEFAULT_BASE_URL", "ApiKey", "BaseUrl"]

DEFAULT_BASE_URL: Final = "http://127.0.0.1:30000"

BaseUrl = Annotated[str, typer.Option(envvar="COSERVE_BASE_URL", help="The server.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar=["COSERVE_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token."),
]
