"""Batches of several keys, some paused, some cancelled, with lines that are no good among them."""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import httpx
import orjson

from chaos_bench.answers import KnownAnswer, answered_text
from chaos_bench.figures import ChaosError, Figure, Observation

_FINAL: Final = frozenset({"completed", "failed", "expired", "cancelled"})
_KEYS: Final = ("key-0", "key-1", "key-2")
_RETRY_S: Final = 0.3
_DRAIN_TIMEOUT_S: Final = 900.0
"""For the last batches."""

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
        """Return the counts that every chaos run reports."""
        return [
            Figure("batches", self.batches),
            Figure("lines", self.lines),
            Figure("lines lost", self.lost, at_most=0),
            Figure("lines doubled", self.doubled, at_most=0),
            Figure("lines different", self.different, at_most=0),
        ]


class BatchLoad:
    """Keeps some batches unfinished until it is stopped."""

    def __init__(
        self,
        base_url: str,
        known: Sequence[KnownAnswer],
        options: argparse.Namespace,
        hostile: Mapping[str, Sequence[dict[str, Any]]] = MappingProxyType({}),
    ) -> None:
        """Take options of ``chaos_parser``, and hostile bodies to mix in, by endpoint."""
        self._known: dict[str, list[KnownAnswer]] = {}
        for answer in known:
            self._known.setdefault(answer.path, []).append(answer)
        self._hostile = hostile
        self._lines: int = options.lines
        self._unfinished: int = options.unfinished
        self._rng = random.Random(options.seed)
        self._client = httpx.Client(base_url=base_url, timeout=_CALL_TIMEOUT_S, trust_env=False)
        self._submitted: list[_Submitted] = []
        self.seen: list[Observation] = []
        """Every call, also those that were made again."""

        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin to submit."""
        self._thread.start()

    def stop(self) -> None:
        """Submit no more.

        Raises:
            ChaosError: submitting had failed.
        """
        self._stop.set()
        self._thread.join(_CALL_TIMEOUT_S * 2)
        if self._error is not None:
            raise ChaosError(f"submitting batches failed: {self._error!r}") from self._error

    def results(self) -> LineCounts:
        """Wait for the end of all batches and compare every record.

        Raises:
            ChaosError: they do not end.
        """
        give_up_s = time.monotonic() + _DRAIN_TIMEOUT_S
        counts = LineCounts(batches=len(self._submitted))
        told_s = 0.0
        for number, batch in enumerate(self._submitted):
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

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                alive = [b for b in self._submitted if self._found(b)["status"] not in _FINAL]
                if len(alive) < self._unfinished:
                    self._submit()
                elif alive:
                    self._disturb(self._rng.choice(alive))
                self._stop.wait(_RETRY_S)
        except BaseException as error:
            self._error = error

    def _submit(self) -> None:
        number = len(self._submitted)
        key = self._rng.choice(_KEYS)
        endpoint = self._rng.choice(list(self._known))
        known, hostile = self._known[endpoint], self._hostile.get(endpoint)
        wanted: dict[str, str | None] = {}
        content = bytearray()
        for line in range(self._lines):
            custom_id = f"{number}-{line}"
            if hostile and self._rng.random() < _HOSTILE_SHARE:
                body, wanted[custom_id] = self._rng.choice(hostile), None
            else:
                answer = self._rng.choice(known)
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
                "coserve": {"priority": self._rng.randint(-2, 2)},
            },
            headers={"idempotency-key": f"batch-{number}"},
        )
        self._submitted.append(_Submitted(key, batch["id"], wanted))

    def _disturb(self, batch: _Submitted) -> None:
        chance = self._rng.random()
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
        """Ask until the server is there; a conflict is an answer, too."""
        headers = {"authorization": f"Bearer {key}", **request.pop("headers", {})}
        response = self._request(method, path, headers=headers, **request)
        fields: dict[str, Any] = orjson.loads(response.content)
        return fields

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        while True:
            start_s = time.monotonic()
            status, detail = 0, ""
            try:
                response = self._client.request(method, path, **request)
                status, detail = response.status_code, response.text[:300]
            except httpx.TransportError:
                pass
            self.seen.append(Observation("batch", start_s, time.monotonic(), status, detail=detail))
            if 200 <= status < 300 or status == 409:
                return response
            # Not there, stopping, full, or too much at once: later it will be well.
            if status not in (0, 429) and status < 500:
                raise ChaosError(f"{method} {path}: {status} {detail}")
            time.sleep(_RETRY_S)

    def _compare(self, batch: _Submitted, found: dict[str, Any], counts: LineCounts) -> None:
        seen: dict[str, int] = {}
        counts.lines += len(batch.wanted)
        for record in self._records(batch, found):
            custom_id = record["custom_id"]
            seen[custom_id] = seen.get(custom_id, 0) + 1
            if custom_id not in batch.wanted:
                counts.different += 1
                counts.examples.append(f"{batch.batch_id}: a record for {custom_id!r}")
            elif (record["error"] or {}).get("code") == _GIVE_UP_CODE:
                counts.given_up += 1
            elif not _is_as_wanted(record, batch.wanted[custom_id]):
                counts.different += 1
                counts.examples.append(f"{batch.batch_id}: {str(record)[:400]}")
        counts.doubled += sum(count - 1 for count in seen.values())
        if not batch.is_cancelled:
            lost = batch.wanted.keys() - seen
            counts.lost += len(lost)
            counts.examples += [f"{batch.batch_id}: no record for {name}" for name in sorted(lost)]
            if found["status"] != "completed":
                counts.examples.append(f"{batch.batch_id} is {found['status']}")

    def _records(self, batch: _Submitted, found: dict[str, Any]) -> list[dict[str, Any]]:
        records = []
        for file_id in (found["output_file_id"], found["error_file_id"]):
            if file_id is not None:
                headers = {"authorization": f"Bearer {batch.key}"}
                content = self._request("GET", f"/v1/files/{file_id}/content", headers=headers)
                records += [orjson.loads(line) for line in content.content.splitlines()]
        return records


def _is_as_wanted(record: dict[str, Any], wanted: str | None) -> bool:
    response = record["response"]
    if response is None:
        return False
    if wanted is None:
        return bool(response["status_code"] < 500)
    if response["status_code"] != 200:
        return False
    return answered_text(response["body"]["choices"][0]) == wanted
