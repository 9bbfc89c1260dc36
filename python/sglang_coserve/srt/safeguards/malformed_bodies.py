"""Answers malformed bodies with 400 where SGLang's own validation crashes on them.

SGLang's models of OpenAI bodies read fields before their types are checked. The resulting
exceptions would be answered with 500, as faults of the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastapi.responses import JSONResponse

from sglang_coserve.asgi import error_content
from sglang_coserve.srt import compat

__all__ = ["install_body_errors"]

_MODELS: Final = "sglang.srt.entrypoints.openai.protocol"
_ERRORS: Final = (AttributeError, IndexError, KeyError, RecursionError, TypeError)


def install_body_errors(app: Any) -> None:
    """Install handlers in SGLang's app that tell malformed bodies from faults of the server."""
    for kind in _ERRORS:
        app.add_exception_handler(kind, _answer)

    compat.check_extra_keys()


async def _answer(_request: Any, error: Exception) -> JSONResponse:
    """Answer with 400 if ``error`` was raised in a model of a body; any other stays a 500.

    Raises:
        Exception: ``error`` itself, if it was not raised in such a model.
    """
    if _MODELS not in _modules_of(error):
        raise error
    message = f"malformed body: {type(error).__name__}: {error}"
    return JSONResponse(error_content(400, message), status_code=400)


def _modules_of(error: Exception) -> Iterator[str]:
    """Yield the modules in the traceback of ``error``."""
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
