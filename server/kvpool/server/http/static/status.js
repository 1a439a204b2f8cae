// The status page: takes the parts of the server's stream, and shows them. Texts of clients are shown as text only.

import { AGES, NUM_COLOURS, STATES, cellAt, countsOf, drawChart, drawMap, layoutOf, sizeOf } from "./figures.js";

const PARTS = ["server", "pools", "blocks", "sessions", "members", "history", "events"];
const LATE_SECONDS = 10;

const data = {};
const pools = new Map(); // by name: the element, what it shows, the counters of the copy before
let colouring = "state";
let receivedSeconds = null;
let isOpen = false;
let isDue = false;

const one = (selector, root = document) => root.querySelector(selector);
const number = new Intl.NumberFormat("en-US");
const few = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${few.format(count / size)} ${unit}`;
  return `${count} B`;
}

// A member of an enum of the protos as text: "lost" for RANK_STATE_LOST.
function wordOf(name, prefix) {
  return name.replace(prefix, "").toLowerCase().replaceAll("_", " ");
}

function plural(count, noun) {
  return `${number.format(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- The stream

function connect() {
  const stream = new EventSource("api/v2/stream");
  for (const name of PARTS)
    stream.addEventListener(name, (event) => {
      data[name] = JSON.parse(event.data);
      receivedSeconds = performance.now() / 1000;
      isOpen = true;
      render();
    });
  stream.onerror = () => {
    isOpen = false;
    showConnection();
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
  };
}

function showConnection() {
  const shown = one("#connection");
  const age = receivedSeconds === null ? null : performance.now() / 1000 - receivedSeconds;
  const isLive = isOpen && age < LATE_SECONDS;
  shown.className = isLive ? "live" : age === null ? "" : "lost";
  setText(shown, isLive ? "Live" : age === null ? "Connecting" : "No answer; figures are old");
}

// ---- Rendering: at most once per frame

function render() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    showConnection();
    showServer();
    showPools();
    showMisses();
    showSessions();
    showRanks();
    showMembers();
    showEvents();
  });
}

function showServer() {
  const server = data.server;
  if (!server) return;
  const { info } = server;
  const ready = one("#readiness");
  ready.className = `pill ${server.is_ready ? (server.detail ? "warn" : "ok") : "bad"}`;
  setText(ready, server.is_ready ? "ready" : "not ready");
  const facts = [server.detail, info.shard && `shard ${info.shard}`, server.role && `${server.role}, term ${info.term}`,
    server.standbys_missing && `${plural(server.standbys_missing, "standby")} missing`,
    !server.is_directory_up && "etcd cannot be used", `version ${info.version}`, `up ${duration(info.uptime_seconds)}`];
  setText(one("#server-facts"), facts.filter(Boolean).join(" · "));
  for (const each of document.querySelectorAll(".of-cluster")) each.hidden = !info.shard;
}

function showPools() {
  if (!data.pools || !data.server) return;
  const found = data.pools.pools;
  const empty = one("#no-pools");
  empty.hidden = found.length > 0;
  setText(empty, data.server.role && data.server.role !== "primary"
    ? "This server is a standby. The page of the shard's primary shows the pools."
    : "No pools. A scheduler or the ranks of an engine create the first one.");
  const rest = data.server.num_pools - found.length;
  setText(one("#pools"), rest > 0 ? `Pools (the first ${found.length} of ${number.format(data.server.num_pools)})` : "Pools");
  const names = new Set(found.map(({ info }) => info.config.name));
  for (const [name, shown] of pools) if (!names.has(name)) { shown.element.remove(); pools.delete(name); }
  for (const pool of found) {
    const { name } = pool.info.config;
    showPool(pools.get(name) ?? addPool(name), pool);
  }
}

function addPool(name) {
  const element = one("#pool").content.firstElementChild.cloneNode(true);
  const shown = { element, selected: null, before: null, rates: null, drawn: null };
  setText(one(".name", element), name);
  one(".map", element).setAttribute("aria-label", `Blocks of pool ${name}; arrow keys select a run of blocks`);
  one(".map", element).addEventListener("keydown", (event) => moveSelection(shown, event));
  one(".map", element).addEventListener("pointermove", (event) => {
    const box = one("canvas", element).getBoundingClientRect();
    if (shown.map) select(shown, cellAt(shown.map, box.width, event.clientX - box.left, event.clientY - box.top));
  });
  one(".map", element).addEventListener("pointerleave", () => select(shown, null));
  one(".map", element).addEventListener("blur", () => select(shown, null));
  one("#pool-list").append(element);
  pools.set(name, shown);
  return shown;
}

function showPool(shown, { info, free_cached_blocks: freeCached, pending_blocks: pending }) {
  const { element } = shown;
  const { name } = info.config;
  const stateWord = wordOf(info.state, "POOL_STATE_");
  const state = one(".state", element);
  state.className = `pill state ${stateWord === "ready" ? "ok" : stateWord === "degraded" ? "bad" : "warn"}`;
  setText(state, stateWord);
  const kinds = [...new Set(info.groups.map((group) => group.kind.replaceAll("_", " ")))];
  const versions = info.weights_versions.filter(Boolean);
  setText(one(".kind", element), [`epoch ${info.epoch}`, kinds.join(", "), versions.length ? `weights ${versions.join(", ")}` : ""]
    .filter(Boolean).join(" · "));
  const rates = ratesOf(shown, info);
  const blocks = Math.max(info.config.num_blocks - 1, 0); // without the null block
  const used = blocks ? blocks - info.free_blocks : 0;
  const { shared_hits_tokens: sharedHits, hits_tokens: hits } = info.prefix_cache;
  const share = (count) => (blocks ? percent(count / blocks) : "");
  showFigures(one(".figures", element), [
    ["Blocks", number.format(blocks), ""],
    ["In use", number.format(used), share(used)],
    ["Cached, free", number.format(freeCached), share(freeCached)],
    ["Empty", number.format(info.free_blocks - freeCached), share(info.free_blocks - freeCached)],
    ["Pending", number.format(pending), ""],
    ["In quarantine", number.format(info.quarantined_blocks), ""],
    ["Hit rate", percent(info.recent_hit_rate), "recent"],
    ...sizesOf(name).map(({ size, hit_ratio: ratio }) => [`Hit rate at ${size}x`, percent(ratio), "blocks, in 1 h"]),
    ["Hits of others", percent(sharedHits / Math.max(hits, 1)), "of hits"],
    ...(info.host_memory ? hostFigures(info, rates) : []),
    ["Evictions", rates ? few.format(rates.evicted) : "–", "per s"],
    ["Allocations", rates ? few.format(rates.allocated) : "–", "per s"],
    ["Refused", number.format(info.activity.refusals), "in all"],
    ["Preempted", number.format(info.preemptions), "in all"],
    ["Running", number.format(info.running_requests), "requests"],
    ["Waiting", number.format(info.requests - info.running_requests), "requests"],
  ]);
  shown.map = data.blocks?.pools.find((each) => each.pool === name);
  showMap(shown, name);
  showCharts(shown, name, blocks);
}

// The second tier: what it caches and serves, and the copies there and back.
function hostFigures({ config, host_memory: host, prefix_cache: cache }, rates) {
  const hits = Number(cache.hits_tokens) + Number(cache.preempted_hits_tokens);
  return [
    ["In host memory", number.format(host.cached_blocks), `of ${number.format(config.num_host_blocks)} blocks`],
    ["Hits from host", percent(cache.host_hits_tokens / Math.max(hits, 1)), "of hits"],
    ["Host copies", rates ? few.format(rates.copied) : "–", "per s"],
  ];
}

// Hit rates in pools of other sizes over the last hour; none before look-ups, or without an estimate.
function sizesOf(pool) {
  const history = data.history?.pools.find((each) => each.pool === pool);
  return (history?.hit_ratios_by_size ?? []).filter(({ size }) => size !== 1);
}

// Rates between the last two copies; null before the second one.
function ratesOf(shown, info) {
  const taken = data.server.taken_seconds;
  const { copied_out_blocks: out = 0, copied_in_blocks: back = 0 } = info.host_memory ?? {};
  const now = { taken, evicted: info.evicted_blocks, allocated: info.activity.allocations, copied: Number(out) + Number(back) };
  if (shown.before && taken > shown.before.taken) {
    const seconds = taken - shown.before.taken;
    const rate = (name) => Math.max(now[name] - shown.before[name], 0) / seconds;
    shown.rates = { evicted: rate("evicted"), allocated: rate("allocated"), copied: rate("copied") };
  }
  if (!shown.before || taken > shown.before.taken) shown.before = now;
  return shown.rates;
}

function showFigures(list, figures) {
  figures.forEach(([name, value, unit], i) => {
    let entry = list.children[i];
    if (!entry) {
      entry = document.createElement("div");
      entry.append(document.createElement("dt"), document.createElement("dd"));
      entry.lastChild.append(document.createElement("span"), " ", document.createElement("small"));
      list.append(entry);
    }
    setText(entry.firstChild, name);
    setText(entry.lastChild.firstChild, value);
    setText(entry.lastChild.lastChild, unit);
  });
  while (list.children.length > figures.length) list.lastChild.remove();
}

// ---- The map of a pool

function sessionsOf(pool) {
  return (data.sessions?.sessions ?? []).filter(({ info }) => info.pool_name === pool);
}

function colourOfSession(session) {
  return `s${session % NUM_COLOURS}`;
}

function showMap(shown, name) {
  const { element, map } = shown;
  const figure = one(".blocks", element);
  figure.hidden = !map || !map.cached.length;
  if (figure.hidden) return;
  showLegend(one(".legend", figure), legendOf(map, name));
  drawMap(one("canvas", figure), map, colouring, colourOfSession, shown.selected);
  one(".map", figure).setAttribute("aria-valuemax", String(map.cached.length));
  showReadout(shown);
}

function legendOf(map, pool) {
  if (colouring === "state") {
    const sums = Object.fromEntries(STATES.map(([name]) => [name, 0]));
    for (let cell = 0; cell < map.cached.length; cell++)
      for (const [name, count] of Object.entries(countsOf(map, cell))) sums[name] += count;
    return STATES.map(([name, text]) => [name, `${text} ${percent(sums[name] / map.num_blocks)}`]);
  }
  if (colouring === "age") {
    const ages = AGES.map((text, i) => [`age-${i}`, text]);
    return [["held", "in use"], ...ages, ["empty", "empty"]];
  }
  const seen = [...new Set(map.sessions)].filter(Boolean).sort((a, b) => a - b);
  const names = new Map(sessionsOf(pool).map(({ info }) => [Number(info.session_number), info.client_name]));
  const shown = seen.slice(0, NUM_COLOURS).map((session) => [
    colourOfSession(session), `session ${session}${names.has(session) ? (names.get(session) ? `, ${names.get(session)}` : "") : ", ended"}`]);
  const rest = seen.length > shown.length ? [["none", `and ${seen.length - shown.length} more`]] : [];
  return [...shown, ...rest, ["held", "no contents to hit"], ["empty", "empty"]];
}

function showLegend(list, entries) {
  while (list.children.length > entries.length) list.lastChild.remove();
  entries.forEach(([name, text], i) => {
    let entry = list.children[i];
    if (!entry) {
      entry = document.createElement("li");
      entry.append(document.createElement("i"), document.createElement("span"));
      list.append(entry);
    }
    if (entry.className !== name) entry.className = name;
    setText(entry.lastChild, text);
  });
}

function showReadout(shown) {
  const { map, selected, element } = shown;
  const slider = one(".map", element);
  const text = selected === null || selected >= map.cached.length ? hintOf(map) : describeCell(map, selected);
  setText(one(".readout", element), text);
  slider.setAttribute("aria-valuenow", String((selected ?? 0) + 1));
  slider.setAttribute("aria-valuetext", text);
}

function hintOf(map) {
  const each = `${plural(map.cached.length, "cell")} of ${plural(map.blocks_per_cell, "block")}`;
  return `${each}${map.is_sampled ? ", estimated from a part of them" : ""}. Point at a cell, or focus the map and use the arrow keys.`;
}

function describeCell(map, cell) {
  const first = cell * map.blocks_per_cell + 1;
  const counts = countsOf(map, cell);
  const states = STATES.filter(([name]) => counts[name]).map(([name, text]) => `${number.format(counts[name])} ${text}`);
  const session = map.sessions[cell] ? `; filled by session ${map.sessions[cell]}` : "";
  const age = map.reuse_percent[cell];
  const order = age < 0 ? "" : `; evicted after ${age}% of the cached blocks`;
  return `Blocks ${number.format(first)} to ${number.format(first + sizeOf(map, cell) - 1)}: ${states.join(", ")}${session}${order}`;
}

function select(shown, cell) {
  if (shown.selected === cell || !shown.map) return;
  shown.selected = cell;
  drawMap(one("canvas", shown.element), shown.map, colouring, colourOfSession, cell);
  showReadout(shown);
}

function moveSelection(shown, event) {
  if (!shown.map) return;
  const { columns } = layoutOf(shown.map, one("canvas", shown.element).clientWidth);
  const last = shown.map.cached.length - 1;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -Infinity, End: Infinity };
  if (event.key === "Escape") select(shown, null);
  if (!(event.key in steps)) return;
  event.preventDefault();
  const at = shown.selected === null ? 0 : shown.selected + steps[event.key];
  select(shown, Math.max(0, Math.min(at, last)));
}

function showCharts(shown, pool, blocks) {
  const history = data.history?.pools.find((each) => each.pool === pool);
  const key = history ? `${history.times_seconds.at(-1)} ${history.times_seconds.length} ${innerWidth}` : "";
  if (!history || shown.drawn === key) return;
  shown.drawn = key;
  const { times_seconds: times, hit_ratios: ratios, evicted_blocks: evicted, used_blocks: used } = history;
  const perSecond = evicted.map((count, i) => count / (i ? Math.max(times[i] - times[i - 1], 1) : 10));
  const most = Math.max(...perSecond, 1);
  const charts = [
    ["hits", "Hit rate", ratios, 1, percent, ratios.findLast((ratio) => ratio !== null)],
    ["evictions", "Evictions per second", perSecond, most, (value) => `${few.format(value)} per s`, perSecond.at(-1)],
    ["used", "Blocks in use", used, blocks, (value) => number.format(value), used.at(-1)],
  ];
  for (const [name, title, values, top, format, now] of charts) {
    const svg = one(`.${name}`, shown.element);
    const text = now === undefined ? "no sample yet" : format(now);
    setText(one(".now", svg.parentElement), text);
    svg.setAttribute("aria-label", `${title} over the last hour; now ${text}`);
    drawChart(svg, times, values, top, format);
  }
}

// ---- Tables

// Fills a table; a cell is a text, or [text, class]. Cells that do not change stay, so that a selection does.
function fill(name, rows, emptyText) {
  const table = one(`[data-table="${name}"]`);
  const body = one("tbody", table);
  const labels = [...table.tHead.rows[0].cells];
  const empty = one(".empty", table.parentElement);
  table.hidden = rows.length === 0;
  setText(empty, rows.length ? "" : emptyText);
  empty.hidden = rows.length > 0;
  while (body.rows.length > rows.length) body.lastChild.remove();
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? newRow(body, labels);
    cells.forEach((cell, j) => {
      const [text, style] = Array.isArray(cell) ? cell : [cell, ""];
      const shown = style ? pillOf(row.cells[j]) : row.cells[j];
      if (style) { if (shown.className !== `pill ${style}`) shown.className = `pill ${style}`; }
      setText(shown, String(text));
      row.cells[j].classList.toggle("none", text === "");
    });
  });
}

function pillOf(cell) {
  if (!cell.firstElementChild) cell.replaceChildren(document.createElement("span"));
  return cell.firstElementChild;
}

// With explicit roles: the narrow layout shows rows as blocks, which would remove those of a table.
function newRow(body, labels) {
  const row = body.insertRow();
  row.setAttribute("role", "row");
  labels.forEach((label, j) => {
    const cell = document.createElement(j ? "td" : "th");
    cell.setAttribute("role", j ? "cell" : "rowheader");
    if (j) cell.dataset.label = label.textContent;
    else cell.scope = "row";
    cell.className = label.className;
    if (label.textContent === "Fields") cell.className = "fields";
    row.append(cell);
  });
  return row;
}

// The reasons are those of `kvpool explain`, which says what to change.
function showMisses() {
  if (!data.pools) return;
  const rows = data.pools.pools.flatMap(({ info }) => {
    const misses = info.groups.flatMap((group, i) => group.misses.map((miss) => ({ ...miss, group: `${i}, ${group.kind.replaceAll("_", " ")}` })));
    const tokens = misses.reduce((sum, miss) => sum + Number(miss.tokens), 0);
    return misses.sort((a, b) => b.tokens - a.tokens).map((miss) => [
      info.config.name, miss.group, wordOf(miss.reason, "MISS_REASON_"), number.format(miss.lookups), number.format(miss.tokens),
      percent(tokens ? miss.tokens / tokens : 0),
    ]);
  });
  fill("misses", rows, "No look-up has ended early.");
}

function showSessions() {
  if (!data.sessions) return;
  const held = (info) => info.held_blocks.reduce((sum, count) => sum + count, 0);
  const sorted = [...data.sessions.sessions].sort(({ info: a }, { info: b }) => b.running_requests - a.running_requests || held(b) - held(a));
  fill("sessions", sorted.map(({ info, quarantine }) => [
    info.session_number, info.client_name || "–", info.pool_name,
    number.format(held(info)) + (info.max_blocks ? ` of ${number.format(info.max_blocks)}` : ""),
    info.reserve_tokens || "–", number.format(info.running_requests), number.format(info.requests - info.running_requests), waitOf(info, quarantine),
    number.format(info.sequence), duration(info.age_seconds), info.streaming ? "–" : duration(info.idle_seconds),
  ]), "No sessions.");
  const rest = data.sessions.num_sessions - sorted.length;
  setText(one("#sessions"), rest > 0 ? `Sessions (the first ${sorted.length} of ${number.format(data.sessions.num_sessions)})` : "Sessions");
}

function waitOf(info, quarantine) {
  if (quarantine) {
    const due = quarantine.ends_in_seconds;
    return due === null ? "quarantine: until all ranks have reported" : `quarantine: ends in ${duration(due)}`;
  }
  const waits = [];
  const waiting = info.requests - info.running_requests;
  const unexecuted = Number(info.executed_sequence) ? info.sequence - info.executed_sequence : 0; // 0: it reports none
  if (waiting) waits.push(`blocks for ${plural(waiting, "request")}`);
  if (unexecuted > 0) waits.push(`execution of ${plural(unexecuted, "step")}`);
  return waits.join("; ") || "–";
}

const RANK_STYLES = { ready: "ok", lost: "bad", silent: "bad", absent: "bad" };

function showRanks() {
  if (!data.pools) return;
  const total = data.pools.pools.reduce((sum, { info }) => sum + (info.ranks.length ? info.world_size : 0), 0);
  const shown = data.pools.pools.reduce((sum, { info }) => sum + info.ranks.length, 0);
  setText(one("#ranks"), total > shown ? `Ranks and lenders (the first ${shown} of ${number.format(total)})` : "Ranks and lenders");
  fill("ranks", data.pools.pools.flatMap(({ info, is_lent: isLent }) => info.ranks.map((rank) => {
    const state = wordOf(rank.state, "RANK_STATE_");
    return [
      isLent ? `${rank.rank}, lender` : rank.rank, info.config.name, [state, RANK_STYLES[state] ?? "warn"],
      rank.device || "–", rank.host || "–", rank.pid || "–", bytes(rank.allocated_bytes), number.format(rank.num_blocks), mappedBy(rank),
    ];
  })), "No ranks. The engines own the memory of the blocks.");
}

function mappedBy(rank) {
  return rank.mapping_processes.map((process) => `${process.client_name || "process"} (${process.pid})`).join(", ") || "–";
}

function showMembers() {
  if (!data.members) return;
  fill("members", data.members.members.map((member) => [
    member.member,
    member.is_primary ? ["primary", "ok"] : member.is_in_sync ? ["standby, in sync", "ok"] : ["standby, behind", "warn"],
    member.addresses.join(", "), member.lag_positions === null ? "–" : number.format(member.lag_positions),
    member.lag_seconds === null ? "–" : few.format(member.lag_seconds),
  ]), "The directory has not been read yet.");
}

const EVENT_STYLES = { info: "info", warning: "warn", error: "bad", critical: "bad" };

function showEvents() {
  if (!data.events) return;
  fill("events", data.events.events.map((event) => {
    const fields = Object.entries(event.fields).filter(([, value]) => value !== "").map(([name, value]) => `${name}=${value}`);
    return [timeOf(event.time_seconds), [event.level, EVENT_STYLES[event.level] ?? "info"], event.event, fields.join("  ")];
  }), "No events since the server started.");
}

function timeOf(seconds) {
  const time = new Date(seconds * 1000);
  const isToday = time.toDateString() === new Date().toDateString();
  const clock = time.toLocaleTimeString("en-GB");
  return isToday ? clock : `${time.toLocaleDateString("en-CA")} ${clock}`;
}

// ---- Controls

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(one("#theme"), `Theme: ${theme}`);
  localStorage.setItem("theme", theme);
  render();
}

one("#theme").addEventListener("click", () => {
  const now = localStorage.getItem("theme") ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
one("#colouring").addEventListener("change", (event) => {
  colouring = event.target.value;
  render();
});
for (const table of document.querySelectorAll("table")) {
  table.setAttribute("role", "table");
  for (const part of [table.tHead, ...table.tBodies]) part.setAttribute("role", "rowgroup");
  table.tHead.rows[0].setAttribute("role", "row");
  for (const cell of table.tHead.rows[0].cells) cell.setAttribute("role", "columnheader");
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
addEventListener("resize", render);
setInterval(showConnection, 1000);
setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
connect();
