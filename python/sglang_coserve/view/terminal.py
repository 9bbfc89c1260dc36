"""The view (``shown_view``) in a terminal: a screen, or one line of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sglang_coserve.terminal import printable

_STYLES: Final = {"ok": "green", "harmed": "bold red", "overloaded": "yellow", "unknown": "dim"}
_BARS: Final = "▁▂▃▄▅▆▇█"
_BAR_COUNT: Final = 60
_BATCHES: Final = 8
_DECISIONS: Final = 8
_STALE_S: Final = 5.0

View = Mapping[str, Any]


def as_line(view: View) -> str:
    """Return the view as one line of text, for pipes and logs."""
    users = view["online_users"]
    parts = [
        f"{_clock(view['at'])} {users['level']}",
        *([f"delayed by {_ms(users['bill']['mean_ms'])} a request"] if users["bill"] else ()),
        *(_fleet_in_words(view) if "engines" in view else _engine_in_words(view)),
    ]
    if view["headroom"] is not None:
        parts.append(f"headroom {_number(view['headroom']['headroom_tokens_per_s'])} tokens/s")
    if "engines" not in view and _is_stale(view):
        parts.append("the engine does not answer")
    return printable(", ".join(parts)).replace("\n", " ")


def _engine_in_words(view: View) -> list[str]:
    now = {name: _latest(view["history"], name) for name in view["history"]}
    return [
        *(
            f"{slo['slo'].split(' <=')[0]} {_ms(slo['measured_ms'])}{_added(slo)}"
            for slo in view["online_users"]["slos"]
        ),
        f"online {_number(now.get('online_running'))} running "
        f"{_number(now.get('online_waiting'))} waiting",
        f"offline {_number(now.get('offline_running'))} running "
        f"{_number(now.get('offline_waiting'))} waiting",
        f"offline {_number(now.get('offline_tokens_per_s'))} tokens/s "
        f"{_percent(now.get('offline_share'))} of the time",
    ]


def _fleet_in_words(view: View) -> list[str]:
    engines, fleet = view["engines"], view["fleet"]
    num_up = sum(engine["state"] == "up" for engine in engines)
    in_flight = sum(engine["lines_in_flight"] for engine in engines)
    return [
        f"{num_up} of {len(engines)} engines up",
        f"{in_flight:,} lines in engines {fleet['lines_waiting']:,} waiting",
        f"offline {_number(fleet['offline_tokens_per_s'])} tokens/s",
    ]


def as_screen(view: View) -> RenderableType:
    """Return the view as what fills a terminal."""
    users = view["online_users"]
    return Group(
        _head(view),
        _text(users["text"], _STYLES.get(users["level"], "")),
        *_if(users["bill"], _bill),
        *_if(users.get("slos"), _slo_table),
        _fleet_table(view["engines"]) if "engines" in view else _engine_table(view),
        Rule("batches", align="left", style="dim"),
        _batches(view["batches"]),
        *([_decisions(view["decisions"])] if "decisions" in view else ()),
        Rule("what could be added", align="left", style="dim"),
        _headroom(view["headroom"]),
    )


def _head(view: View) -> Text:
    if "engines" in view:
        return _text(f"coserve gateway  {view['model'] or ''}  {_clock(view['at'])}", "bold")
    head = _text(f"coserve  {view['model']}  policy {view['policy']}  {_clock(view['at'])}", "bold")
    age_s = view["sample_age_s"]
    if age_s is None:
        head.append("  the engine has not said anything yet", "red")
    elif age_s > _STALE_S:
        head.append(f"  the engine was last heard of {age_s:.0f} s ago", "red")
    return head


def _bill(bill: View) -> Text:
    return Text(
        f"because of offline work, a request: {_ms(bill['mean_ms'])}, of that TTFT "
        f"{_ms(bill['ttft_ms'])}, gaps {_ms(bill['gaps_ms'])} (mean of {bill['requests']:,.0f} "
        "in the last 5 minutes)"
    )


def _slo_table(slos: Sequence[View]) -> Table:
    table = _table("objective", "measured", "limit", "without offline", "because of offline")
    table.add_column("")
    for slo in slos:
        is_known = slo["measured_ms"] is not None
        standing = ("met" if slo["met"] else "missed") if is_known else "not known yet"
        style = "" if not is_known else "green" if slo["met"] else "red"
        values = [_ms(slo[name]) for name in ("measured_ms", "limit_ms", "online_alone_ms")]
        added = "–" if slo["added_ms"] is None else f"+{_ms(slo['added_ms'])}"
        table.add_row(_text(slo["slo"]), *values, added, Text(standing, style))
    return table


def _fleet_table(engines: Sequence[View]) -> RenderableType:
    table = _table("engine", "state", "lines", "window", "offline tokens/s", "online", "offline")
    table.add_column("online users")
    for engine in engines:
        load, users = engine["load"], engine["online_users"]
        running = [load[of]["running"] if load else None for of in ("online", "offline")]
        why = engine["takes_no_lines_because"]
        table.add_row(
            _text(engine["url"]),
            _text(f"{engine['state']}: {why}" if why else engine["state"], "red" if why else ""),
            *map(_number, (engine["lines_in_flight"], engine["window"])),
            *map(_number, (engine["offline_tokens_per_s"], *running)),
            _text(users["level"], _STYLES.get(users["level"], "")) if users else "–",
        )
    return Group(Rule("engines", align="left", style="dim"), table)


def _engine_table(view: View) -> RenderableType:
    history = view["history"]
    table = Table.grid(padding=(0, 2))
    rows = (
        ("online time", "online_share", _percent, "blue", 1.0),
        ("offline time", "offline_share", _percent, "yellow", 1.0),
        ("online tokens/s", "online_tokens_per_s", _number, "blue", None),
        ("offline tokens/s", "offline_tokens_per_s", _number, "yellow", None),
        ("suspended steps/s", "suspensions_per_s", _number, "yellow", None),
        ("offline KV tokens", "offline_kv_tokens", _number, "yellow", None),
        ("online waiting", "online_waiting", _number, "blue", None),
        ("offline waiting", "offline_waiting", _number, "yellow", None),
    )
    for label, name, show, style, top in rows:
        values = history.get(name, [])
        value = Text(show(_latest(history, name)), justify="right")
        table.add_row(label, value, Text(_sparkline(values, top), style))
    return Group(Rule("engine", align="left", style="dim"), table)


def _batches(batches: View | None) -> RenderableType:
    if batches is None:
        return Text("the Batch API is off: --coserve-data-dir", "dim")
    if batches["error"]:
        return _text(batches["error"], "red")
    if batches["path"] is None:
        return Text("shown with the server's key: --api-key", "dim")
    if not batches["data"]:
        return Text("none", "dim")
    # The newest come first; those that go on before those that have ended.
    shown = sorted(batches["data"], key=lambda batch: bool(batch["completed_at"]))
    table = _table("batch", "status", "done", "P50", "P95", "window ends")
    for batch in shown[:_BATCHES]:
        counts, ours = batch["request_counts"], batch["coserve"]
        done = f"{counts['completed'] + counts['failed']:,}/{counts['total']:,}"
        is_late = None not in (ours["eta"], expires_at := batch["expires_at"])
        is_late = is_late and ours["eta"] > expires_at
        table.add_row(
            _text(batch["id"]),
            "paused" if ours["paused"] else _text(batch["status"].replace("_", " ")),
            done,
            Text(_moment(ours["eta"]), "red" if is_late else ""),
            _moment(ours["eta_p95"]),
            _moment(batch["expires_at"]),
        )
    return table


def _decisions(decisions: Sequence[View]) -> RenderableType:
    rule = Rule("why", align="left", style="dim")
    if not decisions:
        none = "none: there was no offline work, or --offline-policy fifo"
        return Group(rule, Text(none, "dim"))
    table = Table.grid(padding=(0, 2))
    for decision in decisions[:_DECISIONS]:
        count = Text(f"{decision['steps']:,}×", "dim", justify="right")
        table.add_row(Text(_clock(decision["at"]), "dim"), count, _text(decision["text"]))
    return Group(rule, table)


def _headroom(headroom: View | None) -> Text:
    if headroom is None or headroom["headroom_tokens_per_s"] is None:
        return Text("not known: with the Batch API, once offline work was served", "dim")
    return Text(
        f"{_number(headroom['headroom_tokens_per_s'])} tokens/s: offline work gets "
        f"{_number(headroom['tokens_per_s'])}, batches need "
        f"{_number(headroom['required_tokens_per_s'])} for their windows"
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, overflow="fold")  # A batch's id is to be read as a whole.
    for name in others:
        table.add_column(name, justify="right")
    return table


def _is_stale(view: View) -> bool:
    return view["sample_age_s"] is None or bool(view["sample_age_s"] > _STALE_S)


def _if(values: Any, show: Any) -> Iterable[RenderableType]:
    return [show(values)] if values else []


def _text(text: str, style: str = "") -> Text:
    return Text(printable(str(text)), style)


def _sparkline(values: Sequence[float | None], top: float | None) -> str:
    shown = list(values)[-_BAR_COUNT:]
    top = top or max((value for value in shown if value is not None), default=0.0) or 1.0
    last = len(_BARS) - 1
    return "".join(
        " " if value is None else _BARS[min(last, round(last * value / top))] for value in shown
    )


def _latest(history: View, name: str) -> float | None:
    values = history.get(name)
    return values[-1] if values else None


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _percent(share: float | None) -> str:
    # A step counts whole in the second in which it ended.
    return "–" if share is None else f"{min(share, 1.0):.0%}"


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _added(slo: View) -> str:
    return "" if slo["added_ms"] is None else f" (+{_ms(slo['added_ms'])})"


def _clock(epoch_s: float) -> str:
    return _time(epoch_s, "%H:%M:%S")


def _moment(epoch_s: float | None) -> str:
    return "–" if epoch_s is None else _time(epoch_s, "%m-%d %H:%M")


def _time(epoch_s: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(epoch_s).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "–"
