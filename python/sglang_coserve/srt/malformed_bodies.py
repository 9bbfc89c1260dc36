"""Answers bodies of odd types with a 400 where SGLang's own checks of them fail.

SGLang's models of OpenAI bodies look into a body before its types are checked, and
run into errors of their own on it, which would be answered as the server's fault.
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
    """Let an app of SGLang's, and its handlers, tell a malformed body from a fault of their own."""
    for kind in _ERRORS:
        app.add_exception_handler(kind, _answer)

    compat.check_extra_keys()


async def _answer(_request: Any, error: Exception) -> JSONResponse:
    """Answer an error that a model of a body ran into; leave any other to be a 500.

    Raises:
        Exception: ``error`` itself, where no model ran into it.
    """
    if _MODELS not in _modules_of(error):
        raise error
    message = f"malformed body: {type(error).__name__}: {error}"
    return JSONResponse(error_content(400, message), status_code=400)


def _modules_of(error: Exception) -> Iterator[str]:
    """Yield the modules in which ``error`` was raised, and passed on."""
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
