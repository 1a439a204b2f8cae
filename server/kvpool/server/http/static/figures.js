// Draws the map of a pool's blocks, and small charts. Texts and numbers beside them are the caller's.

export const STATES = [
  ["in_use", "in use"], ["pending", "pending"], ["quarantined", "in quarantine"], ["cached", "cached, free"], ["empty", "empty"],
];
export const AGES = ["oldest fifth of the free blocks, evicted first", "second", "third", "fourth", "newest fifth"];
export const NUM_COLOURS = 10;

const GAP = 1;
const SVG = "http://www.w3.org/2000/svg";

// Index in AGES of a cell; -1 if no cached block of it is known.
export function ageOf(map, cell) {
  return Math.min(Math.floor(map.reuse_percent[cell] / 20), 4);
}

export function sizeOf(map, cell) {
  return Math.min(map.blocks_per_cell, map.num_blocks - cell * map.blocks_per_cell);
}

export function countsOf(map, cell) {
  const counts = Object.fromEntries(STATES.slice(0, 4).map(([name]) => [name, map[name][cell]]));
  counts.empty = sizeOf(map, cell) - counts.in_use - counts.pending - counts.quarantined - counts.cached;
  return counts;
}

// Columns and size of the cells in a width of CSS pixels.
export function layoutOf(map, width) {
  const count = map.cached.length;
  const size = Math.max(7, Math.min(26, Math.floor(Math.sqrt((width * 230) / Math.max(count, 1)))));
  const columns = Math.max(1, Math.floor((width + GAP) / (size + GAP)));
  return { columns, size: (width + GAP) / columns - GAP, rows: Math.ceil(count / columns) };
}

export function cellAt(map, width, x, y) {
  const { columns, size } = layoutOf(map, width);
  const column = Math.min(Math.floor(x / (size + GAP)), columns - 1);
  const cell = Math.floor(y / (size + GAP)) * columns + column;
  return cell >= 0 && cell < map.cached.length ? cell : null;
}

export function drawMap(canvas, map, colouring, colourOfSession, selected) {
  const width = canvas.parentElement.clientWidth;
  const { columns, size, rows } = layoutOf(map, width);
  const ratio = window.devicePixelRatio || 1;
  const height = rows * (size + GAP);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(`--${name}`);
  const colours = new Map();
  const cached = (name) => colours.get(name) ?? colours.set(name, colour(name)).get(name);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  for (let cell = 0; cell < map.cached.length; cell++) {
    const x = (cell % columns) * (size + GAP);
    const y = Math.floor(cell / columns) * (size + GAP);
    let bottom = y + size;
    for (const [name, share] of layersOf(map, cell, colouring, colourOfSession)) {
      const layer = share * size;
      context.fillStyle = cached(name);
      context.fillRect(x, bottom - layer, size, layer);
      bottom -= layer;
    }
    if (cell === selected) {
      context.strokeStyle = cached("text");
      context.lineWidth = 2;
      context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    }
  }
}

// Colours of a cell and their shares, from the bottom.
function layersOf(map, cell, colouring, colourOfSession) {
  const counts = countsOf(map, cell);
  const total = sizeOf(map, cell);
  if (colouring === "state") return STATES.map(([name]) => [name, counts[name] / total]);
  const held = (counts.in_use + counts.pending + counts.quarantined) / total;
  if (colouring === "age") {
    const age = ageOf(map, cell);
    return [["held", held], [age < 0 ? "empty" : `age-${age}`, counts.cached / total], ["empty", counts.empty / total]];
  }
  const session = map.sessions[cell];
  const filled = held + counts.cached / total;
  return [[session ? colourOfSession(session) : "held", filled], ["empty", counts.empty / total]];
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A line over the samples, at most an hour; null values are gaps. `top` is the largest value of the axis.
export function drawChart(svg, times, values, top, format) {
  const width = svg.clientWidth || 280;
  const [left, right, up, down] = [0, width, 8, 46];
  svg.setAttribute("viewBox", `0 0 ${width} 62`);
  const end = times.at(-1) ?? 0;
  const span = Math.min(Math.max(end - (times[0] ?? 0), 300), 3600);
  const x = (time) => right - ((end - time) / span) * (right - left);
  const y = (value) => down - (top ? Math.min(value / top, 1) : 0) * (down - up);
  const parts = [shape("line", { class: "axis", x1: left, x2: right, y1: down, y2: down }),
    shape("line", { class: "axis", x1: left, x2: right, y1: up, y2: up })];
  for (const run of runsOf(times, values)) {
    const points = run.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    const first = points[0].split(",")[0];
    const last = points.at(-1).split(",")[0];
    parts.push(shape("polygon", { class: "area", points: `${first},${down} ${points.join(" ")} ${last},${down}` }));
    parts.push(shape("polyline", { class: "line", points: points.length > 1 ? points.join(" ") : `${points[0]} ${Number(first) + 2},${points[0].split(",")[1]}` }));
  }
  parts.push(shape("text", { x: left, y: 59 }, `${Math.round(span / 60)} min ago`), shape("text", { x: right, y: 59, "text-anchor": "end" }, "now"));
  parts.push(shape("text", { x: left, y: up + 11 }, format(top)));
  svg.replaceChildren(...parts);
}

function runsOf(times, values) {
  const runs = [];
  let run = null;
  values.forEach((value, i) => {
    if (value === null) run = null;
    else if (run) run.push([times[i], value]);
    else runs.push((run = [[times[i], value]]));
  });
  return runs;
}
