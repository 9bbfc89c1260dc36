"""kill -9 of the server at random moments: in the end every line has its one record."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from batch_bench.batch_server import BatchServer
from batch_bench.figures import Figure
from batch_bench.input_file import write_lines
from batch_bench.setting import Setting

__all__ = ["Outcome", "compare", "measure"]

_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 96
_TIMEOUT_S: Final = 900.0
_EARLIEST_START_KILL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the lines of one batch."""

    lost: int
    """Without a record."""

    doubled: int
    """Records beyond one a line."""

    different: int
    """With another answer than undisturbed, or an error."""


def compare(expected: Mapping[str, Any], records: Iterable[tuple[str, Any]]) -> Outcome:
    """Return how ``records`` of (custom id, answer) differ from one for each in ``expected``."""
    counts: Counter[str] = Counter()
    different = 0
    for custom_id, answer in records:
        counts[custom_id] += 1
        different += custom_id not in expected or answer != expected[custom_id]
    return Outcome(
        lost=len(expected.keys() - counts),
        doubled=sum(count - 1 for count in counts.values()),
        different=different,
    )


def measure(setting: Setting) -> list[Figure]:
    """Kill a server of its own while a batch is under way, and compare with undisturbed answers."""
    options = setting.options
    rng = random.Random(options.seed)
    path = setting.work / "crashes.jsonl"
    write_lines(
        path,
        options.crash_lines,
        vocab_size=setting.model.vocab_size,
        prompt_tokens=_PROMPT_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
        seed=options.seed,
    )
    with setting.server("crashes") as server:
        file_id = server.upload(path)
        undisturbed_id = server.create(file_id)
        server.until(undisturbed_id, "completed", timeout_s=_TIMEOUT_S)
        expected = dict(_records(server, undisturbed_id))
        batch_ids = [server.create(file_id)]
        start_s = _EARLIEST_START_KILL_S
        is_under_way, num_under_way = True, 0
        for number in setting.track(options.crashes, "kill -9"):
            if _dies_starting(number):
                server.start_and_kill(rng.uniform(_EARLIEST_START_KILL_S, start_s))
            else:
                if server.client.batches.retrieve(batch_ids[-1]).status == "completed":
                    batch_ids.append(server.create(file_id))
                time.sleep(rng.uniform(0.0, options.crash_up_s))
                status = server.client.batches.retrieve(batch_ids[-1]).status
                is_under_way = status != "completed"
                server.kill()
            num_under_way += is_under_way
            if number + 1 == options.crashes or not _dies_starting(number + 1):
                began_s = time.perf_counter()
                server.start()
                start_s = time.perf_counter() - began_s
        outcomes = []
        for batch_id in batch_ids:
            server.until(batch_id, "completed", timeout_s=_TIMEOUT_S)
            outcomes.append(compare(expected, _records(server, batch_id)))
    path.unlink()
    return [
        Figure("kills", "", (options.crashes,)),
        Figure("of them with a batch under way", "", (num_under_way,)),
        Figure("batches killed or restarted", "", (len(outcomes),)),
        Figure("lines lost", "", (sum(o.lost for o in outcomes),), at_most=0),
        Figure("lines doubled", "", (sum(o.doubled for o in outcomes),), at_most=0),
        Figure("answers that differ", "", (sum(o.different for o in outcomes),), at_most=0),
    ]


def _dies_starting(number: int) -> bool:
    """Tell whether this kill comes before the server is ready again."""
    return number % 5 == 4


def _records(server: BatchServer, batch_id: str) -> list[tuple[str, Any]]:
    """Return (custom id, answer) of every record; the answer is None for an error."""
    batch = server.client.batches.retrieve(batch_id)
    found = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        content = server.client.files.content(file_id).content if file_id else b""
        for text in content.splitlines():
            record = orjson.loads(text)
            choices = (record["response"] or {}).get("body", {}).get("choices")
            found.append((record["custom_id"], choices[0]["text"] if choices else None))
    return found
