"""What ``/coserve/view`` says, in a terminal: tables, or one line of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_coserve.terminal import printable

_STYLES: Final = {"ok": "green", "harmed": "bold red", "overloaded": "yellow", "unknown": "dim"}
_MOST: Final = 8
"""Of batches and decisions."""

_OBJECTIVES: Final = ("objective", "measured", "without offline", "because of offline")
_LATENCIES: Final = {
    "ttft": "time to first token",
    "tpot": "mean gap of a request",
    "tbt": "gaps between tokens",
    "e2e": "end to end",
}
_BESIDE: Final = ("latency", "P50", "alone", "ratio", "P99", "alone", "ratio")
_ENGINES: Final = ("engine", "state", "lines", "window", "offline tokens/s", "online users")
_BATCHES: Final = ("batch", "status", "waits for", "done", "expected", "window ends")
_TEXTS: Final = ("", "state", "status", "waits for", "online users")
"""Columns after the first that are no numbers."""
_FINAL: Final = ("completed", "failed", "expired", "cancelled")
_STALE_S: Final = 5.0

_WAITS: Final = {
    "check": "the check of its input",
    "slot": "a slot, which other lines have",
    "suspect": "lines that may have crashed the engine, which run alone",
    "model": "the exchange of the model",
    "engine": "the engine",
    "disk": "the disk",
    "paused": "being resumed",
    "quota": "room in the quota of its key",
    "error": "another attempt after an internal error",
}

View = Mapping[str, Any]


def as_line(view: View) -> str:
    """Return the view as one line of text, for pipes and logs."""
    users = view["online_users"]
    parts = [
        f"{_clock(view['at'])} {users['level']}",
        *([f"delayed by {_ms(users['bill']['mean_ms'])} a request"] if users["bill"] else ()),
        *(
            f"{slo['slo'].split(' <=')[0]} {_ms(slo['measured_ms'])}{_added(slo)}"
            for slo in users.get("slos", ())
        ),
        *_kept(users),
        *_figures(view),
    ]
    return printable(", ".join(parts)).replace("\n", " ")


def as_tables(view: View) -> RenderableType:
    """Return the view as what is shown again and again."""
    users = view["online_users"]
    if "engines" in view:
        head = f"coserve gateway  {view['model'] or ''}"
    else:
        head = f"coserve  {view['model']}  policy {view['policy']}"
    shown: list[RenderableType] = [
        _text(f"{head}  {_clock(view['at'])}", "bold"),
        _text(users["text"], _STYLES.get(users["level"], "")),
    ]
    if stopped_by := view.get("offline_stopped_by"):
        text = "offline requests wait until the engine's next start, because planning has failed"
        shown.append(_text(f"{text}: {stopped_by}", "bold red"))
    if promise := users.get("promise"):
        shown.insert(1, _text(f"promised: {promise}"))
    if bill := users["bill"]:
        shown.append(
            _text(
                f"because of offline work, a request: {_ms(bill['mean_ms'])}, of that TTFT "
                f"{_ms(bill['ttft_ms'])}, gaps {_ms(bill['gaps_ms'])} (mean of "
                f"{bill['requests']:,.0f} in the last 5 minutes)"
            )
        )
    if slos := users.get("slos"):
        shown.append(_table(_OBJECTIVES, map(_slo_row, slos)))
    if latencies := users.get("latencies"):
        rows = ((text, *_beside(latencies[name])) for name, text in _LATENCIES.items())
        shown.append(_table(_BESIDE, rows))
    if kept := list(_kept(users)):
        shown.append(_text(", ".join(kept)))
    shown.append(_text(", ".join(_figures(view))))
    if engines := view.get("engines"):
        shown.append(_table(_ENGINES, map(_engine_row, engines)))
    shown.append(_batches(view["batches"]))
    if decisions := view.get("decisions"):
        rows = ((_clock(d["at"]), f"{d['steps']:,}×", d["text"]) for d in decisions[:_MOST])
        shown.append(_table(("why", "steps", ""), rows))
    return Group(*shown)


def _kept(users: View) -> Iterable[str]:
    """Yield how much of their speed streams keep, and of their cache conversations."""
    if (streams := users.get("streams")) and streams["slowdown"]["p99"] is not None:
        p50, p99 = (f"{1 / streams['slowdown'][name]:.0%}" for name in ("p50", "p99"))
        yield f"streams at {p50} of their speed alone (slowest 1% {p99})"
    if (cache := users.get("cache")) and cache["share"] is not None:
        yield f"conversations find {cache['share']:.0%} of the cached tokens"


def _figures(view: View) -> Iterable[str]:
    if "engines" in view:
        engines, fleet = view["engines"], view["fleet"]
        num_up = sum(engine["state"] == "up" for engine in engines)
        in_flight = sum(engine["lines_in_flight"] for engine in engines)
        yield f"{num_up} of {len(engines)} engines up"
        yield f"{in_flight:,} lines in engines {fleet['lines_waiting']:,} waiting"
        yield f"offline {_number(fleet['offline_tokens_per_s'])} tokens/s"
    else:
        now = {name: values[-1] for name, values in view["history"].items() if values}
        for who in ("online", "offline"):
            running, waiting = (_number(now.get(f"{who}_{of}")) for of in ("running", "waiting"))
            yield f"{who} {running} running {waiting} waiting"
        share = now.get("offline_share")
        # A step counts whole in the second in which it ended.
        of_time = "–" if share is None else f"{min(share, 1.0):.0%}"
        yield f"offline {_number(now.get('offline_tokens_per_s'))} tokens/s {of_time} of the time"
    if (headroom := view["headroom"]) is not None:
        yield f"headroom {_number(headroom['headroom_tokens_per_s'])} tokens/s"
    if "sample_age_s" in view:
        age_s = view["sample_age_s"]
        if age_s is None or age_s > _STALE_S:
            since = "yet" if age_s is None else f"for {age_s:.0f} s"
            yield f"the engine has not answered {since}"


def _beside(compared: View) -> Iterable[str]:
    for name in ("p50", "p99"):
        yield from (_ms(compared[of][name]) for of in ("measured_ms", "online_alone_ms"))
        ratio = compared["ratio"][name]
        yield "–" if ratio is None else f"{ratio:.2f} ×"


def _slo_row(slo: View) -> Sequence[str]:
    measured, alone, added = (_ms(slo[f"{of}_ms"]) for of in ("measured", "online_alone", "added"))
    missed = " missed" if slo["measured_ms"] is not None and not slo["met"] else ""
    return slo["slo"], measured + missed, alone, added


def _engine_row(engine: View) -> Sequence[str]:
    why, users = engine["takes_no_lines_because"], engine["online_users"]
    return (
        engine["url"],
        f"{engine['state']}: {why}" if why else engine["state"],
        *map(_number, (engine["lines_in_flight"], engine["window"])),
        _number(engine["offline_tokens_per_s"]),
        users["level"] if users else "–",
    )


def _batches(batches: View | None) -> RenderableType:
    if batches is None:
        return Text("the Batch API is off: --coserve-data-dir", "dim")
    if batches.get("error"):
        return _text(batches["error"], "red")
    if batches["path"] is None:
        return Text("batches are shown with the server's key: --api-key", "dim")
    # The newest come first; those that go on before those that have ended.
    shown = sorted(batches["data"], key=_has_ended)
    return _table(_BATCHES, map(_batch_row, shown[:_MOST])) if shown else Text("no batches", "dim")


def _has_ended(batch: View) -> bool:
    return batch["status"] in _FINAL


def _batch_row(batch: View) -> Sequence[str]:
    counts, ours = batch["request_counts"], batch["coserve"]
    return (
        batch["id"],
        "paused" if ours["paused"] and not _has_ended(batch) else batch["status"].replace("_", " "),
        ours.get("waiting_for") or "–",
        f"{counts['completed'] + counts['failed']:,}/{counts['total']:,}",
        *map(_moment, (ours["eta"], batch["expires_at"])),
    )


def waiting_text(batch: View) -> str:
    """Return what a batch waits for, in words; empty if it runs, or if that is not known."""
    # A server of another version may know other reasons, or tell none.
    reason = batch["coserve"].get("waiting_for")
    return f"waits for {_WAITS.get(reason, reason)}" if reason else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(columns):
        # An id or an address is to be read as a whole, and copied.
        table.add_column(
            name,
            justify="right" if place and name not in _TEXTS else "left",
            overflow="fold",
            no_wrap=not place or name == "status",
        )
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _added(slo: View) -> str:
    return "" if slo["added_ms"] is None else f" (+{_ms(slo['added_ms'])})"


def _clock(epoch_s: float) -> str:
    return f"{datetime.fromtimestamp(epoch_s):%H:%M:%S}"


def _moment(epoch_s: float | None) -> str:
    return "–" if epoch_s is None else f"{datetime.fromtimestamp(epoch_s):%m-%d %H:%M}"
