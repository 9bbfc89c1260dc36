"""Checks, before minutes are spent on loading a model, that the server can listen."""

from __future__ import annotations

import socket

from sglang_coserve.errors import StartupError

__all__ = ["check_listen_address"]


def check_listen_address(host: str, port: int) -> None:
    """Check that ``host:port`` can be listened on now.

    SGLang notices only after the model is loaded, and does not exit then: its warm-up keeps
    sending requests to whichever process has the port.

    Raises:
        StartupError: the port is taken, or the host is not an address of this machine.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as listener:
                # As the server does: connections in TIME_WAIT do not count.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}: choose another "
            "--host or --port, or end what listens there"
        ) from error
