"""Batches of several keys, some paused, some cancelled, with lines that are no good among them."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import orjson

from chaos_bench.answers import KnownAnswer, answered_text
from chaos_bench.figures import ChaosError, Figure, Observation

DRAIN_TIMEOUT_S: Final = 900.0
"""For the last batches."""

_FINAL: Final = frozenset({"completed", "failed", "expired", "cancelled"})
_KEYS: Final = ("key-0", "key-1", "key-2")
_RETRY_S: Final = 0.3
_CALL_TIMEOUT_S: Final = 30.0
_GIVE_UP_CODE: Final = "engine_failed"
_HOSTILE_SHARE: Final = 0.05
_TELL_EVERY_S: Final = 10.0


@dataclass(slots=True)
class _Submitted:
    """A batch, and what its lines must be answered with; None stands for any refusal."""

    key: str
    batch_id: str
    wanted: dict[str, str | None]
    is_cancelled: bool = False


@dataclass(slots=True)
class LineCounts:
    """What became of all lines."""

    batches: int = 0
    lines: int = 0
    lost: int = 0
    """Without a record, though their batch was not cancelled."""

    doubled: int = 0
    different: int = 0
    """Answered with another text than undisturbed, or refused though they are good."""

    given_up: int = 0
    """With a record that says that the engine ended twice while it served the line."""

    examples: list[str] = field(default_factory=list)
    """Of what went wrong, a few."""

    def figures(self) -> list[Figure]:
        """Return the counts."""
        return [
            Figure("batches", self.batches),
            Figure("lines", self.lines),
            Figure("lines lost", self.lost, at_most=0),
            Figure("lines doubled", self.doubled, at_most=0),
            Figure("lines different", self.different, at_most=0),
        ]


@dataclass
class Batches:
    """Sent from a process of its own."""

    base_url: str
    known: Sequence[KnownAnswer]
    """What lines ask for."""

    hostile: Mapping[str, Sequence[dict[str, Any]]]
    """Bodies to mix in, by endpoint."""

    lines: int
    """Of a batch."""

    unfinished: int
    """Batches at a time."""

    rng: random.Random
    submitted: list[_Submitted] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)

    def run(self, stop: Path) -> tuple[LineCounts, list[Observation]]:
        """Keep batches unfinished until the file ``stop`` is there; wait for all, compare them.

        Returns:
            What became of the lines, and every call, also those that were made again.

        Raises:
            ChaosError: a call is refused, or the batches do not end.
        """
        self._client = httpx2.Client(
            base_url=self.base_url, timeout=_CALL_TIMEOUT_S, trust_env=False
        )
        self._submit()
        while not stop.exists():
            time.sleep(_RETRY_S)
            self._submit_or_disturb()
        return self._results(), self.seen

    def _submit_or_disturb(self) -> None:
        alive = [each for each in self.submitted if self._found(each)["status"] not in _FINAL]
        if len(alive) < self.unfinished:
            self._submit()
        elif alive:
            self._disturb(self.rng.choice(alive))

    def _results(self) -> LineCounts:
        give_up_s = time.monotonic() + DRAIN_TIMEOUT_S
        counts = LineCounts(batches=len(self.submitted))
        told_s = 0.0
        for number, batch in enumerate(self.submitted):
            while (found := self._found(batch))["status"] not in _FINAL:
                if found["coserve"]["paused"]:
                    self._call(batch.key, "POST", f"/v1/batches/{batch.batch_id}/resume")
                if (now_s := time.monotonic()) > give_up_s:
                    raise ChaosError(f"batch {batch.batch_id} has not ended: {found}")
                if now_s - told_s > _TELL_EVERY_S:
                    told_s = now_s
                    done, total = (found["request_counts"][k] for k in ("completed", "total"))
                    text = f"batch {number + 1} of {counts.batches}: {done} of {total} lines"
                    print(f"{text}; {give_up_s - now_s:.0f} s left", file=sys.stderr)
                time.sleep(_RETRY_S)
            self._compare(batch, found, counts)
        return counts

    def _submit(self) -> None:
        number = len(self.submitted)
        key = self.rng.choice(_KEYS)
        endpoint = self.rng.choice(sorted({answer.path for answer in self.known}))
        known = [answer for answer in self.known if answer.path == endpoint]
        hostile = self.hostile.get(endpoint)
        wanted: dict[str, str | None] = {}
        content = bytearray()
        for line in range(self.lines):
            custom_id = f"{number}-{line}"
            if hostile and self.rng.random() < _HOSTILE_SHARE:
                body, wanted[custom_id] = self.rng.choice(hostile), None
            else:
                answer = self.rng.choice(known)
                body, wanted[custom_id] = answer.body(), answer.text
            fields = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}
            content += json.dumps(fields).encode() + b"\n"
        upload = {"file": (f"{number}.jsonl", bytes(content))}
        file = self._call(key, "POST", "/v1/files", data={"purpose": "batch"}, files=upload)
        batch = self._call(
            key,
            "POST",
            "/v1/batches",
            json={
                "input_file_id": file["id"],
                "endpoint": endpoint,
                "completion_window": "30d",
                "coserve": {"priority": self.rng.randint(-2, 2)},
            },
            headers={"idempotency-key": f"batch-{number}"},
        )
        self.submitted.append(_Submitted(key, batch["id"], wanted))

    def _disturb(self, batch: _Submitted) -> None:
        chance = self.rng.random()
        path = f"/v1/batches/{batch.batch_id}"
        if chance < 0.02:
            # Before the call: an answer that is lost leaves the batch cancelled all the same.
            batch.is_cancelled = True
            self._call(batch.key, "POST", f"{path}/cancel")
        elif chance < 0.1:
            self._call(batch.key, "POST", f"{path}/pause")
            self._call(batch.key, "POST", f"{path}/resume")

    def _found(self, batch: _Submitted) -> dict[str, Any]:
        return self._call(batch.key, "GET", f"/v1/batches/{batch.batch_id}")

    def _call(self, key: str, method: str, path: str, **request: Any) -> dict[str, Any]:
        fields: dict[str, Any] = orjson.loads(self._answer(key, method, path, **request))
        return fields

    def _answer(self, key: str, method: str, path: str, **request: Any) -> bytes:
        """Ask until the server is there; a conflict is an answer, too."""
        headers = {"authorization": f"Bearer {key}", **request.pop("headers", {})}
        while True:
            start_s = time.monotonic()
            status, detail, content = 0, "", b""
            try:
                response = self._client.request(method, path, headers=headers, **request)
                status, content = response.status_code, response.content
                detail = response.text[:300]
            except httpx2.TransportError:
                pass
            self.seen.append(Observation("batch", start_s, time.monotonic(), status, detail=detail))
            if 200 <= status < 300 or status == 409:
                return content
            # Not there, stopping, full, or too much at once: later it will be well.
            if status not in (0, 429) and status < 500:
                raise ChaosError(f"{method} {path}: {status} {detail}")
            time.sleep(_RETRY_S)

    def _compare(self, batch: _Submitted, found: dict[str, Any], counts: LineCounts) -> None:
        counts.lines += len(batch.wanted)
        seen: Counter[str] = Counter()
        for record in self._records(batch, found):
            custom_id = record["custom_id"]
            seen[custom_id] += 1
            if custom_id not in batch.wanted:
                counts.different += 1
                counts.examples.append(f"{batch.batch_id}: a record for {custom_id!r}")
            elif (record["error"] or {}).get("code") == _GIVE_UP_CODE:
                counts.given_up += 1
            elif not _is_as_wanted(record, batch.wanted[custom_id]):
                counts.different += 1
                counts.examples.append(f"{batch.batch_id}: {str(record)[:400]}")
        counts.doubled += seen.total() - len(seen)
        if not batch.is_cancelled:
            lost = batch.wanted.keys() - seen
            counts.lost += len(lost)
            counts.examples += [f"{batch.batch_id}: no record for {name}" for name in sorted(lost)]
            if found["status"] != "completed":
                counts.examples.append(f"{batch.batch_id} is {found['status']}")

    def _records(self, batch: _Submitted, found: dict[str, Any]) -> list[dict[str, Any]]:
        files = (found["output_file_id"], found["error_file_id"])
        return [
            orjson.loads(line)
            for file_id in files
            if file_id is not None
            for line in self._answer(batch.key, "GET", f"/v1/files/{file_id}/content").splitlines()
        ]


def _is_as_wanted(record: dict[str, Any], wanted: str | None) -> bool:
    response = record["response"]
    if response is None:
        return False
    if wanted is None:
        return bool(response["status_code"] < 500)
    if response["status_code"] != 200:
        return False
    return answered_text(response["body"]["choices"][0]) == wanted
