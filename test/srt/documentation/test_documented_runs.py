"""What the docs tell to type is typed: to the server of the quickstart, on a port that is free.

Not run is what is marked, what starts a server (its flags are looked up), and Python with "(...".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batch.scenarios import lines
from sglang_coserve.local_server import LocalServer
from srt.documentation.blocks import GIVE_UP_S, PAGES, ROOT, Block, Reader, blocks_of

pytestmark = pytest.mark.heavy

QUICKSTART = ROOT / "docs" / "quickstart.md"
ADMIN_KEY = "admin secret"
SERVERS = (
    ["coserve", "serve"],
    ["coserve", "gateway"],
    ["python", "-m", "sglang_coserve.launch_server"],
)


def is_run(block: Block) -> bool:
    if block.mark is not None:
        return False
    if block.language == "python":
        return "(..." not in block.text
    return block.is_shell and not all(
        any(command[: len(server)] == server for server in SERVERS) for command in block.commands()
    )


BLOCKS = [block for page in PAGES for block in blocks_of(page) if is_run(block)]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the server that the quickstart starts, with the model that it makes."""
    directory = tmp_path_factory.mktemp("quickstart")
    (server,) = [block for block in blocks_of(QUICKSTART) if block.mark == "server"]
    ((_, _, *flags),) = server.commands()
    (make,) = [block for block in BLOCKS if "make-model" in block.text]
    Reader("", directory).follow(make)
    for at, flag in enumerate(flags):
        if flag in ("--model-path", "--coserve-data-dir"):
            flags[at + 1] = str(directory / flags[at + 1])
    # What an operator has beside it, and nothing that would take longer than what is shown.
    flags += ["--admin-api-key", ADMIN_KEY, "--startup-profile-seconds", "1"]
    log = directory / "server.log"
    with LocalServer(flags, log_path=log, ready_timeout_s=GIVE_UP_S) as running:
        yield running.base_url


@pytest.fixture(scope="module")
def reader(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Reader]:
    variables = {"URL": base_url, "COSERVE_BASE_URL": base_url, "ADMIN_KEY": ADMIN_KEY}
    readers = {}
    for page in PAGES:
        directory = tmp_path_factory.mktemp(page.stem)
        readers[page] = Reader(base_url, directory, variables)
        (directory / "prompts.jsonl").write_bytes(lines(1, model="default", max_tokens=4))
    return readers


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_is_documented_can_be_done(block: Block, reader: dict[Path, Reader]) -> None:
    reader[block.page].follow(block)
