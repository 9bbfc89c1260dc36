"""A port that is taken is found out before the model is loaded."""

from __future__ import annotations

import errno
import re
import socket
from typing import Any

import pytest

from sglang_coserve.errors import StartupError
from sglang_coserve.local_server import free_port
from sglang_coserve.network import check_listen_address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_free_port_can_be_listened_on_and_stays_free(host: str) -> None:
    port = free_port()
    check_listen_address(host, port)
    check_listen_address(host, port)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"port {port}: .*in use.*choose another"):
            check_listen_address("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.1", "no..name", "a" * 64 + ".example"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=rf"cannot listen on {re.escape(host)}, .*choose"):
        check_listen_address(host, free_port())


def test_a_port_that_has_just_been_used_is_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As every server does.
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)
    check_listen_address("127.0.0.1", port)


def test_a_kernel_without_ipv6_listens_on_the_other_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutIPv6(socket.socket):
        def __init__(self, family: int = -1, *args: Any, **kwargs: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args, **kwargs)

    port = free_port()
    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    check_listen_address("", port)  # Both versions of IP.
    with pytest.raises(StartupError, match="cannot listen on ::1"):
        check_listen_address("::1", port)
