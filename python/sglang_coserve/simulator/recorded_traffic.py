"""The traffic of a server's ``--record-plans``, as traces that ``coserve simulate`` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sglang_coserve.core.control.slo import format_slo
from sglang_coserve.core.latency_model.model import Sample
from sglang_coserve.core.latency_model.model_shape import find_model
from sglang_coserve.core.learned_model import LearnedModel
from sglang_coserve.core.offline_queue import PackedTokens
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot
from sglang_coserve.errors import InputFileError
from sglang_coserve.profiler.fits import write_profile
from sglang_coserve.recording.calls import (
    Arrived,
    Event,
    Finished,
    OfflineAdded,
    Planned,
    Updated,
)
from sglang_coserve.recording.file import read_recording
from sglang_coserve.simulator.flags import SimulationFlags
from sglang_coserve.workload.trace import BLOCK_TOKENS


@dataclass(slots=True)
class _Request:
    arrival_s: float
    prompt_tokens: int
    max_new_tokens: int
    token_ids: PackedTokens | None = None
    """None for online requests, of whose prompts a recording has the length alone."""

    generated_tokens: int = 0
    has_ended: bool = False

    @property
    def output_tokens(self) -> int:
        """What it generated, or may have: of one that still ran nothing else is known."""
        most = max(1, self.max_new_tokens)
        return min(max(1, self.generated_tokens), most) if self.has_ended else most


class RecordedTraffic:
    """What a server was sent, with the lengths of the outputs that it had.

    Prompts of all offline requests are held in memory.
    """

    def __init__(self, lines: Iterable[str], source: str) -> None:
        """Read a recording; messages name its ``source``.

        Raises:
            InputFileError: a line is not as it was written, or no request is in it.
        """
        self._setup, events = read_recording(lines, source)
        self._learned = LearnedModel(self._setup.profile.latency_model, refines=True)
        self._online: list[_Request] = []
        self._offline: list[_Request] = []
        # A name may be another request's once its first one has ended.
        self._live: dict[str, _Request] = {}
        self._seen = EngineSnapshot(0.0, (), (), 0, 0, 0, 0)
        """The last snapshot."""

        self._loads = False
        """KV has come back from host memory."""

        for event in events:
            self._take(event)
        if not (self._online or self._offline):
            raise InputFileError(f"{source}: no request is in it")

    def export(self, directory: Path) -> list[str]:
        """Write ``online.jsonl``, ``offline.jsonl`` and ``profile.json``.

        The traces are in Mooncake's format. Each begins with a request of no tokens at the
        earliest arrival, so that their times stay together; simulations leave it out. The
        profile has the latency model as the recorded steps have refined it.

        Returns:
            The flags of ``coserve simulate`` for the same traffic, machine and policy.

        Raises:
            OSError: the directory cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        began_s = min(each.arrival_s for each in (*self._online, *self._offline))
        blocks: dict[bytes, int] = {}
        for name, requests in (("online", self._online), ("offline", self._offline)):
            rows: list[Mapping[str, Any]] = [
                {"timestamp": 0, "input_length": 0, "output_length": 0}
            ]
            requests.sort(key=lambda each: each.arrival_s)
            rows += [_row(each, began_s, blocks) for each in requests]
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (directory / f"{name}.jsonl").write_text(text, "utf-8")
        setup, chunk_tokens = self._setup, self._setup.config.step_prefill_tokens
        kv_tokens = str(setup.engine.kv_tokens)
        profile = replace(setup.profile, latency_model=self._learned.model)
        write_profile(profile, directory / "profile.json")
        return [
            *("--trace", str(directory / "online.jsonl")),
            *("--offline", str(directory / "offline.jsonl"), "--backlog", "0"),
            *("--profile", str(directory / "profile.json")),
            *("--kv-capacity-tokens", kv_tokens, "--max-context-tokens", kv_tokens),
            *("--page-tokens", str(self._seen.page_tokens)),
            *("--max-running", str(setup.engine.max_requests)),
            *("--max-batch-tokens", str(setup.engine.chunk_tokens)),
            *("--safepoint-layers", str(self._safepoint_layers)),
            *(() if self._loads else ("--checkpoint-gb-s", "0")),
            *(() if self._seen.keeps_prefixes else ("--no-prefix-cache",)),
            *(("--overlap",) if setup.engine.overlaps else ()),
            *("--policy", setup.policy),
            *(("--step-prefill-tokens", str(chunk_tokens)) if chunk_tokens else ()),
            *(("--slo", *map(format_slo, setup.slos)) if setup.slos else ()),
        ]

    @property
    def unsimulated(self) -> list[str]:
        """Names of the server's settings that no flag of ``coserve simulate`` stands for."""
        config = self._setup.config
        usual = SchedulerConfig(seed=config.seed, step_prefill_tokens=config.step_prefill_tokens)
        names = [each.name for each in fields(config) if each.name != "refine"]
        return [name for name in names if getattr(config, name) != getattr(usual, name)]

    @property
    def _safepoint_layers(self) -> int:
        """Between safepoints of the simulated model as large a part of it as was between those of
        the server's."""
        share, num_layers = self._seen.stop_share, find_model(SimulationFlags().model).num_layers
        return 0 if share == 1.0 else max(1, round(share * num_layers))

    def _take(self, event: Event) -> None:
        match event:
            case Arrived(info, _):
                online = _Request(info.arrival_s, info.prompt_tokens, info.max_new_tokens)
                self._online.append(online)
                self._live[info.rid] = online
            case OfflineAdded(request):
                offline = _Request(
                    request.arrival_s,
                    request.num_prompt_tokens,
                    request.max_new_tokens,
                    request.token_ids,
                    request.num_generated_tokens,
                )
                self._offline.append(offline)
                self._live[request.rid] = offline
            case Planned(snapshot, cached_tokens):
                self._seen = snapshot
                self._loads |= None in cached_tokens.values()
                for seen in snapshot.admitted:
                    if (recorded := self._live.get(seen.info.rid)) and not seen.info.is_online:
                        # Less the one that the step under way makes.
                        is_under_way = seen.last_token_s is None
                        recorded.generated_tokens = seen.generated_tokens - is_under_way
            case Updated(result):
                for info, token_s in result.served:
                    if (served := self._live.get(info.rid)) and token_s is not None:
                        served.generated_tokens += info.is_online
                batch, seconds = result.batch, result.seconds
                if seconds is not None and not (batch.is_empty or result.suspensions):
                    self._learned.observe(Sample(batch, seconds), result.overlapping)
            case Finished(rid, ending):
                if (ended := self._live.pop(rid, None)) is not None:
                    ended.has_ended = True
                    # The last token of an offline request came after the last plan.
                    is_offline = ended.token_ids is not None
                    ended.generated_tokens += is_offline and ending is Ending.COMPLETE


def _row(request: _Request, began_s: float, blocks: dict[bytes, int]) -> Mapping[str, Any]:
    row = {
        "timestamp": round((request.arrival_s - began_s) * 1e3, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
    }
    if request.token_ids is None:
        return row
    # Prompts share a block where they agree up to its end.
    ends = range(BLOCK_TOKENS, request.prompt_tokens + 1, BLOCK_TOKENS)
    prefixes = [bytes(request.token_ids[: end * TOKEN_BYTES]) for end in ends]
    return row | {"hash_ids": [blocks.setdefault(prefix, len(blocks)) for prefix in prefixes]}
