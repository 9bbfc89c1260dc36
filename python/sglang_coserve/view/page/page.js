
// Shows what coserve/view answers. Whatever comes from there becomes text, never markup.

const POLL_MS = 2000;
const KEPT_S = 300;
const KEY = "coserve-key";
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 140;

const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem(KEY);
let history = {};
let level = null;
let timer = null;
let isLoading = false;

// --- Elements -----------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function cell(label, kind, ...parts) {
  return element("td", { role: "cell", "data-label": label, class: kind }, element("span", {}, ...parts));
}

function shape(tag, attributes, text = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

// Only what has changed is written, so that a screen reader is not sent back to the start.
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function announce(text) {
  byId("announcement").textContent = text;
}

// --- Words --------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const ifKnown = (format) => (value) => ((value ?? null) === null ? "–" : format(value));
const number = ifKnown((value) => (value < 1e4 ? whole.format(value) : short.format(value)));
const fine = ifKnown((value) => (value < 10 ? value.toFixed(1) : number(value)));
const percent = ifKnown((share) => `${whole.format(share * 100)}%`);
const milliseconds = ifKnown((value) =>
  value >= 1e4 ? `${number(value / 1000)} s` : `${value >= 100 || value === 0 ? whole.format(value) : value.toPrecision(3)} ms`);
const tenths = ifKnown((share) => `${(share * 100).toFixed(1)}%`);
const times = ifKnown((ratio) => `${ratio.toFixed(2)} ×`);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

function moment(seconds) {
  const at = new Date(seconds * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  return at.toLocaleString([], isToday ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
}

// --- Online users -------------------------------------------------------------------------

function showUsers(users) {
  write(byId("verdict"), users.text);
  byId("verdict").className = `verdict ${users.level}`;
  if (level !== null && level !== users.level) announce(users.text);
  level = users.level;
  const parts = [];
  if (users.requests) parts.push(`${number(users.requests)} requests ended in the last 10 minutes`);
  if ((users.attainment ?? null) !== null) parts.push(`${percent(users.attainment)} within their targets`);
  if ((users.attainment_online_alone ?? null) !== null) parts.push(`${percent(users.attainment_online_alone)} would be without offline work, as predicted`);
  write(byId("users-note"), parts.length ? `${parts.join(", ")}.` : "");
  byId("bill").hidden = users.bill === null;
  if (users.bill !== null) {
    figures(byId("bill"), [
      ["Because of offline work, a request", milliseconds(users.bill.mean_ms)],
      ["Of that for its first token", milliseconds(users.bill.ttft_ms)],
      ["And for the gaps after it", milliseconds(users.bill.gaps_ms)],
      ["Mean of the last 5 minutes", `${number(users.bill.requests)} requests`],
    ]);
  }
  const table = byId("slos");
  const slos = users.slos ?? [];  // Of a gateway each engine has its own.
  table.hidden = !slos.length;
  table.tBodies[0].replaceChildren(...slos.map(sloRow));
  write(byId("promise"), users.promise ? `Promised: ${users.promise}` : "");
  showBeside(users);
}

function showStopped(error) {
  write(byId("stopped"), error ? `Offline requests wait until the engine’s next start, because planning has failed: ${error}` : "");
}

const LATENCIES = [["ttft", "Time to first token"], ["tpot", "Mean gap of a request"], ["tbt", "Gaps between tokens"], ["e2e", "End to end"]];

// Of a gateway each engine has its own latencies.
function showBeside({ latencies, streams, cache }) {
  const isKnown = Boolean(latencies?.ttft?.values);
  byId("beside-section").hidden = !isKnown;
  if (!isKnown) return;
  const speed = (slowdown) => percent(slowdown === null ? null : 1 / slowdown);
  figures(byId("beside"), [
    ["Streams, of their speed alone", speed(streams.slowdown.p50)],
    ["The slowest 1% of streams", speed(streams.slowdown.p99)],
    ...(streams.limit === null ? [] : [[`Streams at ${speed(streams.limit)} or more, as promised`, tenths(streams.kept_share)]]),
    ...(cache === null || cache.share === null ? [] : [["Conversations, of the tokens cached alone", percent(cache.share)]]),
    ...(cache === null ? [] : [["Cached tokens kept for conversations", number(cache.protected_tokens)]]),
  ]);
  byId("latencies").tBodies[0].replaceChildren(...LATENCIES.map(([name, label]) => latencyRow(label, latencies[name])));
}

function latencyRow(label, { measured_ms: measured, online_alone_ms: alone, ratio }) {
  const cells = ["p50", "p99"].flatMap((statistic) => {
    const shown = statistic.toUpperCase();
    return [
      cell(shown, "number", milliseconds(measured[statistic])),
      cell(`${shown} alone`, "number", milliseconds(alone[statistic])),
      cell(`${shown} ratio`, "number", times(ratio[statistic])),
    ];
  });
  return element("tr", { role: "row" }, element("th", { role: "rowheader", scope: "row" }, label), ...cells);
}

function sloRow(slo) {
  const [text, kind] = !slo.known || slo.measured_ms === null ? ["not known yet", ""]
    : slo.met ? ["✓ met", "good"]
    : slo.feasible ? ["✗ missed", "bad"]
    : ["✗ missed, alone too", "fair"];
  const added = slo.added_ms === null ? "–" : `+${milliseconds(slo.added_ms)}`;
  return element("tr", { role: "row" },
    element("th", { role: "rowheader", scope: "row" }, slo.slo),
    cell("Measured", "number", milliseconds(slo.measured_ms)),
    cell("Limit", "number", milliseconds(slo.limit_ms)),
    cell("Without offline work", "number", milliseconds(slo.online_alone_ms)),
    cell("Because of offline work", "number", added),
    cell("Standing", kind, text));
}

// --- Engines of a gateway -----------------------------------------------------------------

const STANDINGS = { ok: ["✓ within targets", "good"], harmed: ["✗ hurt", "bad"], overloaded: ["✗ overloaded, alone too", "fair"], unknown: ["not known yet", ""] };

function showFleet(fleet, engines) {
  const up = engines.filter((engine) => engine.state === "up").length;
  figures(byId("fleet"), [
    ["Engines that take lines", `${number(up)} of ${number(engines.length)}`],
    ["Offline tokens/s", number(fleet.offline_tokens_per_s)],
    ["Lines that wait for room", number(fleet.lines_waiting)],
    ["Attempts that moved, or were lost", `${number(fleet.lines_moved)}, ${number(fleet.lines_lost)}`],
    ...(fleet.lines_given_up ? [["Lines given up", number(fleet.lines_given_up)]] : []),
  ]);
  byId("engines").tBodies[0].replaceChildren(...engines.map(engineRow));
}

function engineRow(engine) {
  const why = engine.takes_no_lines_because;
  const state = [engine.state, ...(why ? [element("br"), element("span", { class: "small" }, why)] : [])];
  const [standing, kind] = engine.online_users ? STANDINGS[engine.online_users.level] : ["–", ""];
  const load = engine.load;
  return element("tr", { role: "row", "data-engine": engine.url },
    element("th", { role: "rowheader", scope: "row" }, element("code", {}, engine.url)),
    cell("State", engine.state === "up" && !why ? "good" : "bad", ...state),
    cell("Lines, window", "number", `${number(engine.lines_in_flight)} of ${number(engine.window)}`),
    cell("Offline tokens/s", "number", number(engine.offline_tokens_per_s)),
    cell("Running online, offline", "number", load ? `${number(load.online.running)}, ${number(load.offline.running)}` : "–"),
    cell("Online users", kind, standing));
}

// --- Charts -------------------------------------------------------------------------------

// Nice upper ends of an axis: 1, 2 or 5 times a power of ten.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((end) => end >= value) || 1;
}

const series = (name) => history[name] || [];
const latest = (name) => series(name).at(-1) ?? null;
const sum = (values) => values.reduce((total, value) => total + value, 0);

// The mean of so many seconds before an end; null where nothing is known.
function mean(name, end, seconds) {
  const at = series("at");
  const values = series(name).filter((value, i) => value !== null && at[i] <= end && at[i] > end - seconds);
  return values.length ? sum(values) / values.length : null;
}

const recent = (name) => mean(name, latest("at"), 60);

function frame(top, format, from, to) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
  const y = (value) => HEIGHT * (1 - value / top);
  return { svg, y, top, format, from, to };
}

// Text is not stretched with the chart, so axes are elements of their own.
function place(figure, chart, legend, text) {
  figure.querySelectorAll(".plot, .legend").forEach((old) => old.remove());
  chart.svg.setAttribute("aria-label", text);
  const labels = [
    element("span", { class: "top" }, chart.format(chart.top)),
    element("span", { class: "zero" }, chart.format(0)),
    element("span", { class: "from" }, chart.from),
    element("span", { class: "to" }, chart.to),
  ];
  const axes = element("div", { class: "axes", "aria-hidden": "true" }, ...labels);
  const keys = legend.map(([kind, label, style]) => element("li", { class: `${kind} ${style || ""}` }, label));
  figure.append(element("div", { class: "plot" }, chart.svg, axes), element("ul", { class: "legend" }, ...keys));
}

function timeChart(id, top, format, { areas = [], curves = [] }, text) {
  const at = series("at");
  const end = at.at(-1) || 0;
  const x = (i) => WIDTH * (1 - (end - at[i]) / KEPT_S);
  const chart = frame(top, format, "5 minutes ago", "now");
  for (const value of [0, top / 2, top]) {
    chart.svg.append(shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: chart.y(value), y2: chart.y(value) }));
  }
  let base = at.map(() => 0);
  for (const [name, kind] of areas) {
    const over = base.map((value, i) => value + (series(name)[i] ?? 0));
    const up = over.map((value, i) => `${x(i).toFixed(1)},${chart.y(Math.min(value, top)).toFixed(1)}`);
    const down = base.map((value, i) => `${x(i).toFixed(1)},${chart.y(Math.min(value, top)).toFixed(1)}`).reverse();
    if (at.length > 1) chart.svg.append(shape("polygon", { class: `area ${kind}`, points: [...up, ...down].join(" ") }));
    base = over;
  }
  for (const [name, kind] of curves) {
    let path = "";
    series(name).forEach((value, i) => {
      if (value === null) return;
      path += `${path ? "L" : "M"}${x(i).toFixed(1)} ${chart.y(Math.min(value, top)).toFixed(1)}`;
    });
    if (path) chart.svg.append(shape("path", { class: `curve ${kind}`, d: path }));
  }
  const legend = [
    ...areas.map(([, kind, label]) => [kind, label]),
    ...curves.map(([, kind, label]) => [kind, label, "line"]),
  ];
  place(byId(id), chart, legend, text);
}

function most(...names) {
  return Math.max(0, ...names.flatMap((name) => series(name)).filter((value) => value !== null));
}

function showEngine() {
  const total = (state) => ["online", "offline"].map((who) => `${number(latest(`${who}_${state}`))} ${who}`).join(", ");
  figures(byId("now"), [
    ["Running", total("running")],
    ["Waiting", total("waiting")],
    ["Offline tokens/s, last minute", number(recent("offline_tokens_per_s"))],
    ["Engine time for offline work", percent(recent("offline_share"))],
    ["Steps suspended a second", fine(recent("suspensions_per_s"))],
  ]);
  const minute = (name, format) => format(recent(name));
  timeChart("time-chart", 1, percent, {
    areas: [["online_share", "online", "online"], ["offline_share", "offline", "offline, used"], ["lost_share", "lost", "given up"]],
    curves: [["granted_share", "granted", "offline, granted"]],
  }, `Engine time, last minute: ${minute("online_share", percent)} online, ${minute("offline_share", percent)} offline work of ${minute("granted_share", percent)} granted, ${minute("lost_share", percent)} given up.`);
  timeChart("rate-chart", ceiling(most("online_tokens_per_s", "offline_tokens_per_s")), number, {
    curves: [["online_tokens_per_s", "online", "online"], ["offline_tokens_per_s", "offline", "offline"], ["retracted_tokens_per_s", "lost", "KV taken back"]],
  }, `Tokens a second, last minute: ${minute("online_tokens_per_s", number)} online, ${minute("offline_tokens_per_s", number)} offline; KV of ${minute("retracted_tokens_per_s", number)} tokens a second taken back.`);
  const kv = ["online", "offline", "cached", "free"].map((who) => latest(`${who}_kv_tokens`) || 0);
  timeChart("kv-chart", sum(kv) || 1, number, {
    areas: [["online_kv_tokens", "online", "online"], ["offline_kv_tokens", "offline", "offline"], ["cached_kv_tokens", "cached", "cached prefixes"], ["free_kv_tokens", "free", "free"]],
  }, `KV memory now: ${number(kv[0])} tokens online, ${number(kv[1])} offline, ${number(kv[2])} cached prefixes, ${number(kv[3])} free.`);
  timeChart("stop-chart", ceiling(Math.max(1, most("suspensions_per_s", "dropped_steps_per_s"))), fine, {
    curves: [["suspensions_per_s", "offline", "suspended"], ["dropped_steps_per_s", "lost", "given up"]],
  }, `Offline steps a second, last minute: ${minute("suspensions_per_s", fine)} suspended, ${minute("dropped_steps_per_s", fine)} given up.`);
  if (byId("history").closest("details").open) showHistory();
}

const COLUMNS = [
  ["online_share", "Online time", percent], ["offline_share", "Offline time", percent],
  ["granted_share", "Granted", percent], ["lost_share", "Given up", percent],
  ["online_tokens_per_s", "Online tokens/s", number], ["offline_tokens_per_s", "Offline tokens/s", number],
  ["online_kv_tokens", "Online KV", number], ["offline_kv_tokens", "Offline KV", number],
  ["suspensions_per_s", "Suspended/s", fine],
];

function showHistory() {
  const table = byId("history");
  const cells = COLUMNS.map(([, label]) => element("th", { scope: "col", class: "number" }, label));
  table.tHead.replaceChildren(element("tr", {}, element("th", { scope: "col" }, "Until"), ...cells));
  const at = series("at");
  const rows = [];
  for (let end = at.at(-1); end > at[0]; end -= 30) {
    const values = COLUMNS.map(([name, , format]) => element("td", { class: "number" }, format(mean(name, end, 30))));
    rows.push(element("tr", {}, element("th", { scope: "row" }, clock(end)), ...values));
  }
  table.tBodies[0].replaceChildren(...rows);
}

function figures(list, entries) {
  if (list.childElementCount !== entries.length) {
    list.replaceChildren(...entries.map(() => element("div", {}, element("dt"), element("dd"))));
  }
  entries.forEach(([name, value], i) => {
    write(list.children[i].children[0], name);
    write(list.children[i].children[1], value);
  });
}

// --- Batches ------------------------------------------------------------------------------

const FINAL = ["completed", "failed", "expired", "cancelled"];
const rows = new Map();
const WAITS = {
  check: "the check of its input", slot: "a slot, which other lines have",
  suspect: "lines that may have crashed the engine, which run alone", model: "the exchange of the model",
  engine: "the engine", disk: "the disk", quota: "room in the quota of its key",
  error: "another attempt after an internal error",
};

function showBatches(batches) {
  const table = byId("batches");
  const found = batches === null || batches.path === null ? [] : batches.data;
  const note = batches === null ? "The Batch API is off: the server was started without --coserve-data-dir."
    : batches.error ? batches.error
    : batches.path === null ? "Batches are shown to whoever brings the server’s key."
    : found.length === 0 ? "There are no batches."
    : batches.path === "/v1/batches" ? key ? "Those of this key." : "Those sent without a key." : "Those of every key.";
  write(byId("batches-note"), note);
  table.hidden = !found.length;
  const rank = (batch) => Number(FINAL.includes(batch.status));
  const shown = [...found].sort((a, b) => rank(a) - rank(b) || b.created_at - a.created_at).slice(0, 20);
  const ids = new Set(shown.map((batch) => batch.id));
  for (const [id, row] of rows) {
    if (!ids.has(id)) {
      row.element.remove();
      rows.delete(id);
    }
  }
  shown.forEach((batch, i) => {
    const row = rows.get(batch.id) || batchRow(batch.id);
    updateRow(row, batch, batches.path);
    // Moved only where the order has changed: else it would lose the focus.
    const there = table.tBodies[0].children[i];
    if (there !== row.element) table.tBodies[0].insertBefore(row.element, there || null);
  });
}

function batchRow(id) {
  const row = { buttons: {} };
  for (const name of ["metadata", "delay", "count", "status", "finish", "window", "warning"]) row[name] = element("span");
  row.metadata.className = row.delay.className = row.status.className = "small";
  row.warning.className = "small fair";
  row.progress = element("progress", { max: "1", "aria-label": `Progress of ${id}` });
  const button = (action, label) => {
    const made = element("button", { type: "button", "aria-label": `${label} ${id}`, "data-action": action }, label);
    if (action === "cancel") made.className = "danger";
    made.addEventListener("click", () => act(id, action));
    row.buttons[action] = made;
    return made;
  };
  const lines = (...parts) => element("span", {}, ...parts.flatMap((part) => [part, element("br")]).slice(0, -1));
  row.actions = element("div", { class: "actions" }, button("pause", "Pause"), button("resume", "Resume"), button("cancel", "Cancel"));
  row.element = element("tr", { role: "row", "data-batch": id },
    element("th", { role: "rowheader", scope: "row" }, lines(element("code", {}, id), row.metadata, row.delay)),
    element("td", { role: "cell", "data-label": "Progress" }, lines(row.progress, row.count, row.status)),
    element("td", { role: "cell", "data-label": "Finish" }, row.finish),
    element("td", { role: "cell", "data-label": "Window ends" }, lines(row.window, row.warning)),
    element("td", { role: "cell" }, row.actions));
  rows.set(id, row);
  return row;
}

function updateRow(row, batch, path) {
  const { total, completed, failed } = batch.request_counts;
  const ours = batch.coserve;
  const isFinal = FINAL.includes(batch.status);
  row.path = path;
  row.progress.value = total ? (completed + failed) / total : 0;
  write(row.metadata, Object.values(batch.metadata || {}).join(", ").slice(0, 200));
  write(row.delay, ours.online_delay_s ? `delayed online users by ${milliseconds(ours.online_delay_s * 1000)} in all` : "");
  write(row.count, `${number(completed)} of ${number(total)}${failed ? `, ${number(failed)} failed` : ""}`);
  const waits = !isFinal && ours.waiting_for ? `, waits for ${WAITS[ours.waiting_for] || ours.waiting_for}` : "";
  write(row.status, ours.paused && !isFinal ? "paused" : batch.status.replace("_", " ") + waits);
  write(row.finish, batch.completed_at ? `done ${moment(batch.completed_at)}` : ours.eta && !isFinal ? moment(ours.eta) : "–");
  write(row.window, moment(batch.expires_at));
  const isLate = !isFinal && ours.eta && ours.eta > batch.expires_at;
  write(row.warning, isFinal ? "" : isLate ? "expected after its window" : ours.warning || "");
  row.buttons.pause.hidden = isFinal || ours.paused || batch.status === "cancelling";
  row.buttons.resume.hidden = isFinal || !ours.paused;
  row.buttons.cancel.hidden = isFinal || batch.status === "cancelling";
}

async function act(id, action) {
  const row = rows.get(id);
  if (action === "cancel" && !(await confirmed(id))) return;
  const button = row.buttons[action];
  const hadFocus = document.activeElement === button;
  button.disabled = true;
  try {
    const answer = await call(`.${row.path}/${encodeURIComponent(id)}/${action}`, "POST");
    const body = await answer.json().catch(() => ({}));
    announce(answer.ok ? `${id}: ${{ pause: "paused", resume: "goes on", cancel: "is being cancelled" }[action]}.` : `${id}: ${body.error?.message || answer.status}`);
    if (!answer.ok) write(row.warning, body.error?.message || `answered with ${answer.status}`);
  } catch {
    announce(`${id}: the server did not answer.`);
  }
  button.disabled = false;
  await load();
  const next = Object.values(row.buttons).find((other) => !other.hidden);
  if (hadFocus && button.hidden) (next || byId("batches-title")).focus();
}

function confirmed(id) {
  const dialog = byId("confirm");
  write(byId("confirm-text"), `${id}: results it has so far stay; lines in flight are aborted.`);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// --- Decisions and head-room ----------------------------------------------------------------

function showDecisions(view) {
  write(byId("why-note"), view.decisions.length ? "" : "Nothing has been decided yet: there was no offline work.");
  byId("decisions").replaceChildren(...view.decisions.slice(0, 12).map((decision) =>
    element("li", {},
      element("time", { datetime: new Date(decision.at * 1000).toISOString() }, clock(decision.at)),
      element("span", { class: "text" }, decision.text),
      element("span", { class: "count" }, steps(decision)))));
}

function steps({ steps: count, span_s: span }) {
  if (count === 1) return "1 step";
  return span >= 1 ? `${number(count)} steps in ${number(span)} s` : `${number(count)} steps`;
}

function showHeadroom(headroom) {
  const isKnown = headroom !== null && headroom.headroom_tokens_per_s !== null;
  write(byId("headroom-note"), headroom === null ? "Known with the Batch API: start the server with --coserve-data-dir."
    : isKnown ? "" : "Not known yet: no offline work has been served.");
  byId("headroom").hidden = !isKnown;
  if (!isKnown) return;
  figures(byId("headroom"), [
    ["Could be added now, tokens/s", number(headroom.headroom_tokens_per_s)],
    ["Offline work gets", number(headroom.tokens_per_s)],
    ["Batches need, for their windows", number(headroom.required_tokens_per_s)],
  ]);
}

// --- The last minute, step by step ----------------------------------------------------------

const PERFETTO = "https://ui.perfetto.dev";
let tracePath = null;

function showTrace(path) {
  tracePath = path;
  byId("perfetto").disabled = byId("save-trace").disabled = path === null;
  write(byId("trace-note"), path === null
    ? "The last minute, step by step, is shown to whoever brings the server’s --admin-api-key."
    : "Each step, who was in it, and where it was suspended. ui.perfetto.dev reads it in this browser, and sends it nowhere.");
}

async function lastMinute() {
  const answer = await call(`.${tracePath}?seconds=60`, "GET", 60000);
  if (!answer.ok) throw new Error(`the server answered with ${answer.status}`);
  return answer.arrayBuffer();
}

// Perfetto says PONG once it has been loaded, and can take a trace.
async function isReady(opened) {
  let hasAnswered = false;
  const hear = ({ origin, data }) => { hasAnswered ||= origin === PERFETTO && data === "PONG"; };
  window.addEventListener("message", hear);
  try {
    for (const end = Date.now() + 60000; !hasAnswered; ) {
      if (opened.closed || Date.now() > end) throw new Error(`${PERFETTO} did not open: save the minute, and open it there`);
      opened.postMessage("PING", "*");  // Until it is there, another origin is.
      await new Promise((resolve) => { setTimeout(resolve, 100); });
    }
  } finally {
    window.removeEventListener("message", hear);
  }
}

async function withTrace(use) {
  const buttons = [byId("perfetto"), byId("save-trace")];
  buttons.forEach((button) => { button.disabled = true; });
  write(byId("trace-fault"), "");
  try {
    await use();
  } catch (error) {
    write(byId("trace-fault"), `The last minute: ${error.name === "TimeoutError" || error instanceof TypeError ? "the server did not answer" : error.message}.`);
  }
  buttons.forEach((button) => { button.disabled = tracePath === null; });
}

byId("perfetto").addEventListener("click", () => {
  const opened = window.open(PERFETTO);  // Now: after an answer a browser would block it.
  withTrace(async () => {
    if (opened === null) throw new Error("the browser has blocked the new tab: allow it, or save the minute");
    const [buffer] = await Promise.all([lastMinute(), isReady(opened)]);
    opened.postMessage({ perfetto: { buffer, title: `coserve, the minute before ${clock(Date.now() / 1000)}` } }, PERFETTO, [buffer]);
  });
});
byId("save-trace").addEventListener("click", () => withTrace(async () => {
  const address = URL.createObjectURL(new Blob([await lastMinute()], { type: "application/json" }));
  element("a", { href: address, download: "coserve-trace.json" }).click();
  URL.revokeObjectURL(address);
}));

// --- Why a request was late -----------------------------------------------------------------

let stepsPath = null;

function showLate(path) {
  stepsPath = path;
  byId("late-id").disabled = byId("late-button").disabled = path === null;
  write(byId("late-note"), path === null
    ? "Explained to whoever brings the server’s --admin-api-key."
    : "The steps of the last minutes are kept.");
}

function waitRows(name, wait) {
  return wait.steps.map((step, place) => element("tr", {},
    place ? element("td") : element("th", { scope: "row" }, `${name}, ${milliseconds(wait.seconds * 1000)}`),
    element("td", { class: "number" }, milliseconds(step.of_wait_s * 1000)),
    element("td", {}, `${step.role === "waits" ? "without it" : "with it"}: ${step.text}`)));
}

function explanationRows(request) {
  return [
    element("tr", {}, element("td", { colspan: "3" }, element("code", {}, request.rid), element("br"), request.verdict)),
    ...(request.first_token === null ? [] : waitRows("First token", request.first_token)),
    ...request.longest_gaps.slice(0, 3).flatMap((gap) => waitRows("Gap", gap)),
  ];
}

byId("late-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const id = byId("late-id").value.trim();
  if (!id || stepsPath === null) return;
  byId("late-button").disabled = true;
  write(byId("late-fault"), "");
  byId("late").hidden = true;
  try {
    const answer = await call(`.${stepsPath}/${encodeURIComponent(id)}`);
    const body = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(body.error?.message || `the server answered with ${answer.status}`);
    byId("late").tBodies[0].replaceChildren(...body.requests.flatMap(explanationRows));
    byId("late").hidden = false;
    announce(body.requests[0].verdict);
  } catch (error) {
    write(byId("late-fault"), error.name === "TimeoutError" || error instanceof TypeError ? "The server did not answer." : error.message);
  }
  byId("late-button").disabled = stepsPath === null;
});

// --- The server -----------------------------------------------------------------------------

function call(path, method = "GET", patienceMs = 15000) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  return fetch(path, { method, headers, cache: "no-store", signal: AbortSignal.timeout(patienceMs) });
}

function merge(columns) {
  const at = columns.at || [];
  if (!at.length) return;
  const known = history.at || [];
  const first = known.findIndex((time) => time > at.at(-1) - KEPT_S);
  for (const name of Object.keys(columns)) {
    history[name] = [...(history[name] || []).slice(first < 0 ? known.length : first), ...columns[name]];
  }
}

function askForKey(fault) {
  byId("key-section").hidden = false;
  byId("view").hidden = true;
  byId("key-close").hidden = true;
  write(byId("key-fault"), fault);
  byId("key").focus();
}

async function load() {
  if (isLoading) return;
  isLoading = true;
  clearTimeout(timer);
  try {
    const since = history.at?.at(-1) || 0;
    const answer = await call(`./coserve/view?since=${since}`);
    if (answer.status === 401) {
      const fault = key ? "The server does not take this key." : "";
      key = null;
      sessionStorage.removeItem(KEY);
      askForKey(fault);
      write(byId("link"), "");
      return;
    }
    if (!answer.ok) throw new Error(`answered with ${answer.status}`);
    show(await answer.json());
    timer = setTimeout(load, POLL_MS);
  } catch (error) {
    const reason = error instanceof TypeError || error.name === "TimeoutError" ? "no answer" : error.message;
    write(byId("link"), `The server: ${reason}. Shown is what it said last.`);
    byId("link").className = "state bad";
    timer = setTimeout(load, POLL_MS);
  } finally {
    isLoading = false;
  }
}

function show(view) {
  const isFirst = byId("view").hidden && byId("key-section").hidden === false;
  byId("view").hidden = false;
  if (!isEntering) byId("key-section").hidden = true;
  byId("key-button").hidden = Boolean(key);
  if (isFirst) byId("main").focus();
  const isFleet = "engines" in view;
  byId("fleet-section").hidden = !isFleet;
  for (const name of ["engine", "late", "why"]) byId(`${name}-section`).hidden = isFleet;
  write(byId("server"), isFleet ? `gateway${view.model ? `, ${view.model}` : ""}` : `${view.model}, policy ${view.policy}`);
  const age = isFleet ? 0 : view.sample_age_s;  // What a gateway says is of now.
  const isStale = age === null || age > 5;
  write(byId("link"), age === null ? "The engine has not said anything yet." : isStale ? `The engine was last heard of ${number(age)} s ago.` : "Live");
  byId("link").className = isStale ? "state bad" : "state good";
  showUsers(view.online_users);
  showStopped(view.offline_stopped_by);
  if (isFleet) {
    showFleet(view.fleet, view.engines);
  } else {
    merge(view.history);
    showEngine();
    showTrace(view.trace);
    showLate(view.steps ?? null);
    showDecisions(view);
  }
  showBatches(view.batches);
  showHeadroom(view.headroom);
}

let isEntering = false;

byId("key-button").addEventListener("click", () => {
  isEntering = true;
  byId("key-section").hidden = false;
  byId("key-close").hidden = false;
  byId("key").focus();
});
byId("key-close").addEventListener("click", () => {
  isEntering = false;
  byId("key-section").hidden = true;
  byId("key-button").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem(KEY, key);
  byId("key").value = "";
  write(byId("key-fault"), "");
  isEntering = false;
  load();
});
byId("history").closest("details").addEventListener("toggle", showHistory);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else load();
});
load();
