// The trace store's requests, and one's waterfall. Everything becomes text nodes: nothing is parsed
// as HTML.

const byId = (id) => document.getElementById(id);
const content = byId("content");
const filter = byId("filter");
const SVG = "http://www.w3.org/2000/svg";

// Which of a bar's colours stands for a cause (see traces/explain/causes.py).
const CLASS_OF_CAUSE = {
  work_of_others: "others",
  no_blocks: "wait",
  no_slot: "wait",
  fair_share: "wait",
  grammar: "wait",
  prefix_in_flight: "wait",
  upload: "edge",
  facade: "edge",
  hold_back: "edge",
  writing: "edge",
  network: "edge",
  retries: "edge",
  core_died: "wait",
};
const LEGEND = [
  ["own", "own work, and the engine's for it"],
  ["others", "work of others"],
  ["wait", "waiting"],
  ["edge", "facade and network"],
];

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function say(text, failed = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("failed", failed);
}

function ms(value) {
  if (value === null) return "–";
  return value >= 10_000 ? `${(value / 1000).toFixed(1)} s` : `${value.toFixed(1)} ms`;
}

const percent = (share) => `${(share * 100).toFixed(1)} %`;
const cell = (...children) => element("td", "", ...children);
const number = (text) => element("td", "number", String(text));

// `spanId`: of one of the trace's requests.
function traceLink(traceId, text, spanId = "") {
  const made = element("a", "id", text);
  const which = spanId ? `?span=${encodeURIComponent(spanId)}` : "";
  made.href = `/traces/${encodeURIComponent(traceId)}${which}`;
  return made;
}

// `heads`: [name, is a number]. What does not fit is scrolled to, with the keyboard, too.
function table(className, heads, rows, name) {
  const cells = heads.map(([text, isNumber]) => {
    const head = element("th", isNumber ? "number" : "", text);
    head.scope = "col";
    return head;
  });
  const made = element("table", className, element("thead", "", element("tr", "", ...cells)),
    element("tbody", "", ...rows));
  made.ariaLabel = name;
  const scroll = element("div", "scroll", made);
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "group");
  scroll.ariaLabel = name;
  return scroll;
}

// null, and the reason said: there is no answer.
async function fetchJson(path) {
  try {
    const answer = await fetch(path);
    if (answer.ok) return await answer.json();
    let why = `${answer.status} ${answer.statusText}`;
    try {
      why = (await answer.json()).error.message;
    } catch { /* not ours: the status must do */ }
    say(why, true);
  } catch (error) {
    say(`The server can't be reached: ${error.message}`, true);
  }
  return null;
}

// ---------------------------------------------------------------- all requests

function query() {
  const asked = new URLSearchParams();
  const text = byId("text").value.trim();
  const minTtft = byId("min-ttft").value.trim();
  if (text) asked.set("text", text);
  if (minTtft) asked.set("min_ttft_ms", minTtft);
  if (byId("errors").checked) asked.set("errors", "1");
  return asked;
}

function showInFilter(asked) {
  byId("text").value = asked.get("text") ?? "";
  byId("min-ttft").value = asked.get("min_ttft_ms") ?? "";
  byId("errors").checked = asked.get("errors") === "1";
}

function requestRow(row) {
  const head = element("th", "", traceLink(row.trace_id, row.trace_id.slice(0, 16), row.span_id));
  head.scope = "row";
  head.title = row.trace_id;
  const started = element("time", "", new Date(row.started_unix_ms).toLocaleString());
  started.dateTime = new Date(row.started_unix_ms).toISOString();
  return element("tr", "", head, cell(started), cell(row.name), cell(row.model),
    number(ms(row.ttft_ms)), cell(row.cause.replaceAll("_", " ")), number(ms(row.total_ms)),
    number(row.prompt_tokens), number(row.output_tokens),
    element("td", row.is_error ? "failed" : "", row.status));
}

const REQUEST_HEADS = [["Trace"], ["Started"], ["Request"], ["Model"], ["TTFT", true],
  ["First cause"], ["Total", true], ["Prompt", true], ["Output", true], ["Status"]];

async function drawList() {
  say("Loading…");
  const found = await fetchJson(`/traces/data/requests?${query()}`);
  if (found === null) return;
  const part = found.is_all ? "" : "; older ones are in the store but not read here";
  say(`${found.requests.length} of ${found.num_read} requests, the newest first${part}.`);
  content.replaceChildren(
    found.requests.length
      ? table("requests", REQUEST_HEADS, found.requests.map(requestRow), "Requests")
      : element("p", "soft", "No request fits. A request is here about a second after its end."));
}

function startList() {
  filter.hidden = false;
  showInFilter(new URLSearchParams(location.search));
  filter.addEventListener("submit", (event) => {
    event.preventDefault();
    history.pushState(null, "", `/traces?${query()}`);
    drawList();
  });
  byId("errors").addEventListener("change", () => filter.requestSubmit());
  addEventListener("popstate", () => {
    showInFilter(new URLSearchParams(location.search));
    drawList();
  });
  drawList();
}

// ---------------------------------------------------------------- one request

// A bar from `start` to `end` of `total`, all in ms; at least a hair of it can be seen.
function bar(className, start, end, total) {
  const drawn = document.createElementNS(SVG, "svg");
  drawn.setAttribute("class", className);
  drawn.setAttribute("viewBox", "0 0 1000 10");
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("aria-hidden", "true");
  const from = Math.min(Math.max((start / total) * 1000, 0), 997);
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("x", from);
  rect.setAttribute("width", Math.max(Math.min((end / total) * 1000, 1000) - from, 3));
  rect.setAttribute("height", 10);
  drawn.append(rect);
  return element("td", "track", drawn);
}

function waterfall(rows, totalMs, unattributedMs) {
  const drawn = rows.map((row) => {
    const head = element("th", "", row.name.replaceAll("_", " "));
    head.scope = "row";
    return element("tr", "", head, number(ms(row.ms)), number(percent(row.ms / totalMs)),
      bar(CLASS_OF_CAUSE[row.cause] ?? "own", row.start_ms, row.end_ms, totalMs),
      element("td", "detail", row.detail));
  });
  const rest = element("th", "", "unattributed");
  rest.scope = "row";
  drawn.push(element("tr", "", rest, number(ms(unattributedMs)),
    number(percent(unattributedMs / totalMs)), element("td", "track"), element("td")));
  const heads = [["Part"], ["Time", true], ["Share", true], ["When"], ["Detail"]];
  const legend = LEGEND.map(([name, text]) => element("li", name, text));
  return [table("waterfall", heads, drawn, "Waterfall"), element("ul", "legend", ...legend)];
}

function neighbourRow(neighbour, totalMs) {
  const head = element("th", "id", neighbour.request_id);
  head.scope = "row";
  return element("tr", "", head,
    cell(neighbour.trace_id ? traceLink(neighbour.trace_id, neighbour.trace_id.slice(0, 16)) : "not traced"),
    number(neighbour.steps), number(neighbour.prefill_tokens), number(neighbour.decode_tokens),
    number(ms(neighbour.seconds * 1000)), number(percent((neighbour.seconds * 1000) / totalMs)));
}

function neighbours(explanation, totalMs) {
  const heading = element("h3", "", "Who shared its steps");
  if (!explanation.neighbours.length) {
    return [heading, element("p", "soft", "Nobody: it had them to itself.")];
  }
  const heads = [["Request"], ["Trace"], ["Steps", true], ["Prompt tokens", true],
    ["Generated", true], ["Time", true], ["Share", true]];
  const rows = explanation.neighbours.map((one) => neighbourRow(one, totalMs));
  const left = explanation.neighbours_left_out;
  return [heading, table("neighbours", heads, rows, "Who shared its steps"),
    left ? element("p", "soft", `and ${left} more`) : null];
}

function spans(found) {
  const end = Math.max(...found.spans.map((span) => span.end_ms), 1e-6);
  const rows = found.spans.map((span) => {
    const head = element("th", "", span.name);
    head.scope = "row";
    const className = span.status ? "failed" : span.service.endsWith("engine") ? "own" : "edge";
    return element("tr", "", head, cell(span.service), number(ms(span.start_ms)),
      number(ms(span.end_ms - span.start_ms)), bar(className, span.start_ms, span.end_ms, end),
      element("td", "failed", span.status));
  });
  const heads = [["Span"], ["Process"], ["Start", true], ["Time", true], ["When"], ["Failed with"]];
  const left = found.spans_left_out;
  return element("details", "", element("summary", "", `All ${found.spans.length + left} spans`),
    table("waterfall spans", heads, rows, "Spans"),
    left ? element("p", "soft", `${left} are left out`) : null);
}

function fact(name, value) {
  return value === "" ? null : element("li", "", `${name} `, element("b", "", String(value)));
}

function facts(row, explanation) {
  return element("ul", "facts",
    fact("TTFT", ms(row.ttft_ms)), fact("total", ms(row.total_ms)),
    fact("attributed", percent(explanation.attributed_share)), fact("model", row.model),
    fact("prompt tokens", row.prompt_tokens), fact("cached", row.cached_tokens),
    fact("output tokens", row.output_tokens), fact("status", row.status),
    fact("request", row.request_id), fact("started", new Date(row.started_unix_ms).toLocaleString()));
}

function turns(rows) {
  if (!rows.length) return [];
  return [element("h3", "", "All requests of this trace"),
    table("requests", REQUEST_HEADS, rows.map(requestRow), "All requests of this trace")];
}

async function drawTrace(traceId) {
  byId("all").hidden = false;
  const span = new URLSearchParams(location.search).get("span") ?? "";
  const found = await fetchJson(
    `/traces/data/requests/${encodeURIComponent(traceId)}?span=${encodeURIComponent(span)}`);
  if (found === null) return;
  say("");
  const { request, explanation } = found;
  document.title = `${ms(request.ttft_ms)} to first token · firsttoken traces`;
  const totalMs = Math.max(explanation.total_seconds * 1000, 1e-6);
  const said = element("div", "said", element("p", "", explanation.sentence),
    explanation.advice ? element("p", "soft", `What would have helped: ${explanation.advice}.`) : null,
    found.prefix_text && found.prefix_text !== explanation.advice
      ? element("p", "soft", `Prefix: ${found.prefix_text}.`) : null);
  const until = explanation.ttft_seconds === null ? "end: there was no first token" : "first token";
  content.replaceChildren(...[
    element("h2", "", `${request.name} `, element("span", "id", traceId)),
    facts(request, explanation), said,
    element("h3", "", `From arrival to the ${until}`),
    ...waterfall(found.rows, totalMs, explanation.unattributed_seconds * 1000),
    ...neighbours(explanation, totalMs), ...turns(found.turns), spans(found),
  ].filter(Boolean));
}

const [, , traceId] = location.pathname.split("/");
if (traceId) drawTrace(decodeURIComponent(traceId));
else startList();
