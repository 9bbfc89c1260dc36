"""A real nginx with one of the documentation's files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from http_lines.live_engine import READY_S
from sglang_coserve.local_server import free_port

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
NEEDS_NGINX = pytest.mark.skipif(NGINX is None, reason="needs Debian's package nginx-light")

TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Folders of nginx, which elsewhere need rights."""


@asynccontextmanager
async def running_nginx(
    directory: Path, text: str, addresses: Mapping[str, str]
) -> AsyncGenerator[str]:
    """Run nginx with the settings ``text``, on a port that is free; yield its address.

    ``addresses`` has what stands in the place of what.
    """
    port = free_port()
    folders = "".join(f"{name}_temp_path {directory}/{name};" for name in TEMPORARY)
    own = {"http {": f"http {{ {folders}", "listen 8080;": f"listen 127.0.0.1:{port};"}
    for old, new in {**own, **addresses}.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    config, log = directory / "nginx.conf", directory / "nginx.log"
    config.write_text(text)
    settings = f"daemon off; pid {directory}/nginx.pid; user root;"
    command = [str(NGINX), "-e", "stderr", "-p", str(directory), "-c", str(config), "-g", settings]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        async with asyncio.timeout(READY_S):
            while not await takes_connections(port):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def takes_connections(port: int) -> bool:
    """Whether somebody listens."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
