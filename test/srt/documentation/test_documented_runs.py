"""What the docs tell to type is typed: to the server of the quickstart, on a port that is free.

Not run is what is marked, what starts a server (its flags are looked up), and Python with "(...".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_coserve.local_server import LocalServer
from srt.documentation.blocks import PAGES, ROOT, Block, blocks_of

pytestmark = pytest.mark.heavy

QUICKSTART = ROOT / "docs" / "quickstart.md"
ADMIN_KEY = "admin secret"
SERVERS = (
    ["coserve", "serve"],
    ["coserve", "gateway"],
    ["python", "-m", "sglang_coserve.launch_server"],
)
GIVE_UP_S = 300


def is_run(block: Block) -> bool:
    if block.mark is not None:
        return False
    if block.language == "python":
        return "(..." not in block.text
    return block.is_shell and not all(
        any(command[: len(server)] == server for server in SERVERS) for command in block.commands()
    )


BLOCKS = [block for page in PAGES for block in blocks_of(page) if is_run(block)]


@dataclass(frozen=True)
class Reader:
    """One who types what a page says, in a directory of the page's own."""

    base_url: str
    directory: Path
    environment: Mapping[str, str]

    def follow(self, block: Block) -> None:
        script = block.script
        for documented in ("http://127.0.0.1:30000", "localhost:30000"):
            script = script.replace(documented, self.base_url)
        shell = ["bash", "-euo", "pipefail", "-c"]
        command = [sys.executable, "-c"] if block.language == "python" else shell
        done = subprocess.run(
            [*command, script],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=GIVE_UP_S,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert '"error"' not in done.stdout or '"error":null' in done.stdout, done.stdout


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "ADMIN_KEY": ADMIN_KEY}


@pytest.fixture(scope="module")
def base_url(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[str]:
    """Of the server that the quickstart starts, with the model that it makes."""
    directory = tmp_path_factory.mktemp("quickstart")
    (server,) = [block for block in blocks_of(QUICKSTART) if block.mark == "server"]
    ((_, _, *flags),) = server.commands()
    (make,) = [block for block in BLOCKS if "make-model" in block.text]
    Reader("", directory, environment).follow(make)
    for at, flag in enumerate(flags):
        if flag in ("--model-path", "--coserve-data-dir"):
            flags[at + 1] = str(directory / flags[at + 1])
    # What an operator has beside it, and nothing that would take longer than what is shown.
    flags += ["--admin-api-key", ADMIN_KEY, "--startup-profile-seconds", "1"]
    log = directory / "server.log"
    with LocalServer(flags, log_path=log, ready_timeout_s=GIVE_UP_S) as running:
        yield running.base_url


@pytest.fixture(scope="module")
def reader(
    base_url: str, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Reader]:
    url = {"URL": base_url, "COSERVE_BASE_URL": base_url}
    readers = {}
    for page in PAGES:
        directory = tmp_path_factory.mktemp(page.stem)
        readers[page] = Reader(base_url, directory, environment | url)
        body = {"model": "default", "prompt": "A river", "max_tokens": 4}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        (directory / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    return readers


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_is_documented_can_be_done(block: Block, reader: dict[Path, Reader]) -> None:
    reader[block.page].follow(block)
