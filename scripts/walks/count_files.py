"""How many of our files a request runs through: an online one, a batch line, a suspended step.

    python scripts/walks/count_files.py

A real server with a small model. In all of its processes a profile function (``tracer``) notes
the files of each Python function of ours that is called. Counted are those that ran in the phase of
a request, and of these the ones that do not also run while the server is idle. A phase also has the
calls by which the script sees that it is over, and what happens once a second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil

from sglang_coserve.local_server import LocalServer
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.terminal import markdown_table, terminate_as_interrupt

_TRACER: Final = Path(__file__).parent / "tracer"
_SETTLE_S: Final = 2.0
"""Between phases: each process looks 20 times a second which one it is."""

_SETTLE_TIMEOUT_S: Final = 60.0

_IDLE_S: Final = 5.0
_FLAGS: Final = ("--startup-profile-seconds", "1", "--slo-ttft-ms", "1000", "--slo-tpot-ms", "200")
_COMPLETIONS: Final = "/v1/completions"
_COLUMNS: Final = ("walk", "files", "not when idle")


def main() -> None:
    """Run the walks; print the counts, write the names of the files."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as directory, terminate_as_interrupt():
        work = Path(directory)
        model = str(make_small_model(work / "model", SmallModelSpec()))
        walks = Walks(work)
        os.environ["COSERVE_WALK_DIR"] = str(walks.folder)
        os.environ["PYTHONPATH"] = f"{_TRACER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        flags = ["--model-path", model, "--dtype", "float32", *_FLAGS]
        flags += ["--coserve-data-dir", str(work / "data")]
        with LocalServer(flags, log_path=options.log, ready_timeout_s=600.0) as server:
            url = server.base_url
            with httpx2.Client(base_url=url, timeout=600.0, trust_env=False) as client:
                run(client, walks)
        counts = walks.counts()
    print(markdown_table(_COLUMNS, [(name, *map(str, row)) for name, row in counts.items()]))
    if options.out is not None:
        options.out.write_text(json.dumps({"counts": counts, "files": walks.files}, indent=1))


class Walks:
    """The phases, and which files ran in each."""

    def __init__(self, work: Path) -> None:
        self.folder = work / "walks"
        self.folder.mkdir()
        self.files: dict[str, list[str]] = {}
        self._pids: set[int] = set()
        self._phase = "start"
        (self.folder / "phase").write_text(self._phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note what runs within it."""
        self._enter(name)
        yield
        self._enter("between")
        self.files[name] = sorted(
            {
                file.split("/sglang_coserve/")[-1]
                for path in self.folder.glob(f"{name}.*.json")
                for file in json.loads(path.read_text())
            }
        )

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return by walk what ``_COLUMNS`` say."""
        idle = set(self.files["idle"])
        return {name: (len(files), len(set(files) - idle)) for name, files in self.files.items()}

    def _enter(self, name: str) -> None:
        """Begin a phase, and wait until all processes have written what ran in the one before."""
        before, self._phase = self._phase, name
        (self.folder / "phase").write_text(name)
        time.sleep(_SETTLE_S)

        def written() -> set[int]:
            return {int(path.suffixes[0][1:]) for path in self.folder.glob(f"{before}.*.json")}

        def has_all() -> bool:
            return {pid for pid in self._pids if psutil.pid_exists(pid)} <= written()

        wait_until(has_all, _SETTLE_TIMEOUT_S, f"what ran in the phase {before!r}", 0.1)
        self._pids |= written()


def run(client: httpx2.Client, walks: Walks) -> None:
    """Send the requests of all walks, one walk after the other."""
    complete(client, 8, "default")  # What only the first request of a kind needs is no part of it.
    complete(client, 8, "flex")
    serve_batch(client)
    with walks.phase("idle"):
        resumed(client)
        time.sleep(_IDLE_S)
    with walks.phase("an online request"):
        complete(client, 8, "default")
    with walks.phase("a batch line"):
        serve_batch(client)
    with walks.phase("a suspended step"):
        suspend(client)


def complete(client: httpx2.Client, output_tokens: int, tier: str, prompt_tokens: int = 32) -> None:
    """Have a completion of one class served."""
    prompt = [16 + place % 200 for place in range(prompt_tokens)]
    body = {**_body(prompt, output_tokens), "service_tier": tier}
    client.post(_COMPLETIONS, json=body).raise_for_status()


def serve_batch(client: httpx2.Client) -> None:
    """Have a batch of one line served."""
    body = _body([20, 21, 22, time.time_ns() % 200], 8)
    line = {"custom_id": "one", "method": "POST", "url": _COMPLETIONS, "body": body}
    upload = {"file": ("line.jsonl", json.dumps(line).encode())}
    form = {"data": {"purpose": "batch"}, "files": upload}
    fields = {"endpoint": _COMPLETIONS, "completion_window": "30d"}
    fields["input_file_id"] = asked(client, "POST", "/v1/files", **form)["id"]
    path = f"/v1/batches/{asked(client, 'POST', '/v1/batches', json=fields)['id']}"
    wait_until(lambda: asked(client, "GET", path)["status"] == "completed", 300.0, "a batch", 0.05)


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a greedy completion that does not end early."""
    fields = {"model": "default", "temperature": 0, "ignore_eos": True}
    return {**fields, "prompt": prompt, "max_tokens": max_tokens}


def asked(client: httpx2.Client, method: str, path: str, **request: Any) -> dict[str, Any]:
    """Return the fields of an answer."""
    fields: dict[str, Any] = client.request(method, path, **request).raise_for_status().json()
    return fields


def wait_until(is_true: Callable[[], bool], timeout_s: float, what: str, poll_s: float) -> None:
    """Return when ``is_true``.

    Raises:
        SystemExit: it was not within ``timeout_s``.
    """
    give_up_s = time.perf_counter() + timeout_s
    while not is_true():
        if time.perf_counter() > give_up_s:
            raise SystemExit(f"waited for {what} for {timeout_s:.0f} s in vain")
        time.sleep(poll_s)


def suspend(client: httpx2.Client) -> None:
    """Send online requests beside offline prompts until a step has been suspended and resumed."""
    before = resumed(client)
    with ThreadPoolExecutor() as threads:

        def is_resumed() -> bool:
            prompts = [threads.submit(complete, client, 1, "flex", 1200) for _ in range(2)]
            for _ in range(5):
                complete(client, 2, "default")
            for prompt in prompts:
                prompt.result()
            return resumed(client) > before

        wait_until(is_resumed, 300.0, "a step to be suspended and resumed", 0.0)


def resumed(client: httpx2.Client) -> int:
    """Return how many steps were suspended and have been resumed."""
    (replica,) = asked(client, "GET", "/coserve/status")["replicas"]
    return int(replica["safepoints"]["resumed"])


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    log = Path(tempfile.gettempdir()) / "count_files.log"
    parser.add_argument("--log", type=Path, default=log, help="the server's")
    parser.add_argument("--out", type=Path, help="write counts and names as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
