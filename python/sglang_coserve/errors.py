"""The exceptions a user or the network can cause, and the check of what an extra brings.

::

    CoserveError
    ├── ConfigError            a flag, a file of settings, a hardware or model description
    │   └── UnsupportedError   a valid SGLang setting that cannot be combined with co-serving
    ├── StartupError           a part of co-serving did not take its place in the engine
    ├── MissingExtraError      a package of an optional extra is not installed
    ├── RequestError           one request cannot be served as asked (HTTP 400)
    ├── InputFileError         a file, or a line of it, cannot be used (JSONL, trace, profile)
    ├── StorageError           the disk is full or failing; what was stored stays
    └── ServerError            the server refused, failed, or is gone
        └── ServerGoneError    no answer after every retry

Every message says what is wrong, where, and how to mend it.  Internal
invariants are ``assert`` statements and never part of this tree.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final


class CoserveError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(CoserveError):
    """A setting is missing, malformed, or contradicts another one."""


class UnsupportedError(ConfigError):
    """A valid SGLang setting that co-serving cannot be combined with."""


class StartupError(CoserveError):
    """Co-serving is not in place in the engine, so the server must not start."""


class MissingExtraError(CoserveError, ImportError):
    """A package is not installed that an optional part needs; the message names the extra."""


class RequestError(CoserveError):
    """One request cannot be served as asked; HTTP routes answer 400."""


class InputFileError(CoserveError):
    """A file cannot be used; the message names the line, if one is at fault."""


class StorageError(CoserveError):
    """The disk is full or failing; nothing that was stored is lost."""


class ServerError(CoserveError):
    """The server refused the call or failed while serving it."""


class ServerGoneError(ServerError):
    """The server did not answer, and every retry is used up."""


_EXTRAS: Final = {
    "engine": ("sglang", "torch", "transformers", "scipy", "zmq"),
    "otel": (
        "opentelemetry.sdk",
        "opentelemetry.exporter.otlp.proto.grpc",
        "opentelemetry.exporter.otlp.proto.http",
    ),
    "plot": ("matplotlib",),
    "ray": ("ray", "pyarrow"),
    "remote": ("fsspec", "pyarrow"),
}


_HINTS: Final = {
    errno.EEXIST: "; it is a file, name a directory",
    errno.ENOTDIR: "; name a path of directories",
    errno.EISDIR: "; name a file",
    errno.ENOENT: "; name a path in a directory that exists",
    errno.EACCES: "; name a path that you may use",
    errno.ENOSPC: "; free some space, and run the command again",
}


@contextmanager
def path_errors() -> Iterator[None]:
    """Raise InputFileError for what the system says of a file, with what to do about it."""
    try:
        yield
    except OSError as error:
        # What fails on an open file has no name; of a full disk one knows what to do all the same.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        hint = _HINTS.get(error.errno or 0, "")
        raise InputFileError(f"{where}{error.strerror}{hint}") from error


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise StorageError for what the system says of ``what`` could not be done."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror}") from error


def unreadable(path: object, error: OSError | UnicodeDecodeError) -> str:
    """Return that a file cannot be read, and why, without Python's numbers."""
    if isinstance(error, OSError):
        return f"{path}: cannot be read: {error.strerror or error}"
    return f"{path}: is not in UTF-8: {error.reason}"


def require(extra: str, user: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: Its name.
        user: What needs it, the start of the message.

    Raises:
        MissingExtraError: one is not; the message says what to install.
    """
    for package in _EXTRAS[extra]:
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
