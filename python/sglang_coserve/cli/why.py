"""Why a request was late: coserve why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from sglang_coserve.cli.batches import call_server, showing_answers
from sglang_coserve.cli.console import ServerFlags, say, takes
from sglang_coserve.terminal import flag


@dataclass(frozen=True)
class WhyFlags(ServerFlags):
    """Which server is asked, and how the answer is shown."""

    as_json: bool = flag(False, "As the server's JSON object.", "--json")


@takes(WhyFlags)
def why(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The id of the answer, its x-request-id, or the request_id of a batch's line.",
        ),
    ],
    flags: WhyFlags,
) -> None:
    """Explain when a request got its tokens: what it waited for, and which steps were long.

    Needs the server's --admin-api-key: COSERVE_ADMIN_API_KEY, or else --api-key. The server keeps
    the steps of some minutes.
    """
    from sglang_coserve.view.lateness import explanation_text

    found = call_server(flags, lambda api: api.explanation(request_id), as_operator=True)
    if flags.as_json:
        typer.echo(json.dumps(found))
        return
    with showing_answers(flags):
        say("\n\n".join(explanation_text(each) for each in found["requests"]))
