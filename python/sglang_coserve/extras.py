"""The optional parts of this package: an extra of pyproject.toml each, with what it brings."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from sglang_coserve.errors import MissingExtraError

__all__ = ["require"]

_PACKAGES: Final = {
    "engine": ("sglang", "torch", "transformers", "scipy", "zmq"),
    "otel": (
        "opentelemetry.sdk",
        "opentelemetry.exporter.otlp.proto.grpc",
        "opentelemetry.exporter.otlp.proto.http",
    ),
    "plot": ("matplotlib",),
    "ray": ("ray", "pyarrow"),
}


def require(extra: str, user: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: Its name.
        user: What needs it, the start of the message.

    Raises:
        MissingExtraError: one is not; the message says what to install.
    """
    for package in _PACKAGES[extra]:
        if not _is_installed(package):
            raise MissingExtraError(
                f"{user} needs {package}, which is not installed: "
                f"pip install 'sglang-coserve[{extra}]'"
            )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # A package above it is missing.
        return False
