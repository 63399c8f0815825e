"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const timeline = document.getElementById("timeline"), memory = document.getElementById("memory");
const details = document.getElementById("details"), search = document.getElementById("search");
const found = document.getElementById("found");
const ROW = 18, GAP = 20, AXIS = 18;
const end = Math.max(data.seconds * 1e6, 1);
let from = 0, to = end, chosen = -1, query = "";
const depths = data.threads.map(() => 1);
for (const s of data.spans) depths[s[0]] = Math.max(depths[s[0]], s[1] + 1);
const tops = [];
let height = AXIS;
for (const d of depths) { tops.push(height + GAP - 4); height += GAP + d * ROW; }

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function duration(us) {
  return us >= 1e6 ? (us / 1e6).toPrecision(3) + " s" : us >= 1e3 ? (us / 1e3).toPrecision(3) + " ms" : us.toPrecision(3) + " us";
}
function bytes(n) {
  for (const [f, u] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (n >= f) return (n / f).toPrecision(3) + " " + u;
  return n + " B";
}
function prepare(canvas, h) {
  const scale = window.devicePixelRatio || 1, w = canvas.clientWidth;
  canvas.style.height = h + "px";
  canvas.width = w * scale; canvas.height = h * scale;
  const c = canvas.getContext("2d");
  c.setTransform(scale, 0, 0, scale, 0, 0);
  c.clearRect(0, 0, w, h);
  c.font = "11px ui-monospace, monospace"; c.textBaseline = "middle";
  return [c, w];
}
function matches(label) {
  return query !== "" && (label[0].toLowerCase().includes(query) || label[1].some((n) => n.toLowerCase().includes(query)));
}
function draw() {
  const [c, w] = prepare(timeline, height + 8), k = w / (to - from);
  const ink = colour("--ink"), muted = colour("--muted"), mark = colour("--mark"), line = colour("--line");
  const step = 10 ** Math.floor(Math.log10((to - from) / 4));
  const tick = (to - from) / step > 20 ? 5 * step : (to - from) / step > 8 ? 2 * step : step;
  c.fillStyle = muted;
  for (let t = Math.ceil(from / tick) * tick; t < to; t += tick) {
    const x = (t - from) * k;
    c.fillText(duration(t), x + 3, AXIS / 2);
    c.fillRect(x, 0, 1, 5);
  }
  data.threads.forEach((name, i) => {
    c.fillStyle = line; c.fillRect(0, tops[i] - GAP + 6, w, 1);
    c.fillStyle = muted; c.fillText(name, 4, tops[i] - 6);
  });
  const drawnTo = new Map();
  data.spans.forEach((s, i) => {
    const x = (s[2] - from) * k, width = s[3] * k;
    if (x > w || x + width < 0) return;
    const row = s[0] * 1000 + s[1], y = tops[s[0]] + s[1] * ROW, label = data.labels[s[4]], hit = matches(label);
    if (width < 0.7 && !hit && drawnTo.get(row) >= x) return;
    drawnTo.set(row, x + Math.max(width, 0.7));
    c.globalAlpha = query && !hit ? 0.25 : 1;
    c.fillStyle = data.colours[s[5]];
    c.fillRect(x, y, Math.max(width - 0.5, 0.7), ROW - 2);
    if (width > 3) { c.strokeStyle = muted; c.lineWidth = 0.5; c.strokeRect(x, y, width - 0.5, ROW - 2); c.lineWidth = 1; }
    if (i === chosen || hit) { c.strokeStyle = mark; c.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1.5, 1), ROW - 3); }
    if (width > 30) {
      const left = Math.max(x, 0) + 3, room = Math.floor((Math.min(x + width, w) - left) / 6.7);
      c.fillStyle = "#212121";
      if (room > 2) c.fillText(label[0].length > room ? label[0].slice(0, room - 1) + "…" : label[0], left, y + ROW / 2 - 1);
    }
    c.globalAlpha = 1;
  });
  const samples = data.memory, h = 70, [m, mw] = prepare(memory, samples.length ? h : 1);
  if (!samples.length) return;
  const most = Math.max(...samples.map((s) => s[1])), least = Math.min(...samples.map((s) => s[1]));
  m.strokeStyle = ink; m.beginPath();
  samples.forEach((s, i) => {
    const x = (s[0] - from) * (mw / (to - from)), y = h - 6 - (h - 24) * (most > least ? (s[1] - least) / (most - least) : 0.5);
    if (i) m.lineTo(x, y); else m.moveTo(x, y);
  });
  m.stroke();
  m.fillStyle = muted;
  m.fillText("memory of the process: " + bytes(least) + " to " + bytes(most), 4, 9);
}
function show(i) {
  chosen = i;
  const s = data.spans[i], label = data.labels[s[4]];
  details.textContent = label[0] + " on " + data.wheres[s[5]] + ": " + duration(s[3]) + ", from " + duration(s[2]) + ", thread " +
    data.threads[s[0]] + (label[2] ? ", " + bytes(label[2]) + " moved, " + (label[2] / s[3] / 1e3).toPrecision(3) + " GB/s" : "") +
    (label[1].length ? "\nnodes: " + label[1].join(", ") : "");
}
function zoom(factor, at) {
  const middle = at === undefined ? (from + to) / 2 : at, least = 0.5;
  let width = Math.min(Math.max((to - from) * factor, least), end);
  from = middle - (middle - from) * (width / (to - from));
  move(0, width);
}
function move(by, width = to - from) {
  from = Math.min(Math.max(from + by, 0), Math.max(end - width, 0));
  to = from + width;
  requestAnimationFrame(draw);
}
function timeAt(event) { return from + (event.offsetX / timeline.clientWidth) * (to - from); }
timeline.addEventListener("wheel", (e) => { e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, timeAt(e)); }, { passive: false });
let held = null, moved = 0;
timeline.addEventListener("pointerdown", (e) => { held = e.clientX; moved = 0; timeline.setPointerCapture(e.pointerId); });
timeline.addEventListener("pointermove", (e) => {
  if (held === null) return;
  moved += Math.abs(e.clientX - held);
  move(((held - e.clientX) / timeline.clientWidth) * (to - from));
  held = e.clientX;
});
timeline.addEventListener("pointerup", (e) => {
  held = null;
  if (moved > 4) return;
  const t = timeAt(e), slack = ((to - from) / timeline.clientWidth) * 2;
  let best = -1;
  data.spans.forEach((s, i) => {
    const y = tops[s[0]] + s[1] * ROW;
    if (e.offsetY >= y && e.offsetY < y + ROW && t >= s[2] - slack && t <= s[2] + s[3] + slack) best = i;
  });
  if (best >= 0) { show(best); draw(); }
});
timeline.addEventListener("keydown", (e) => {
  const part = (to - from) / 5;
  const keys = { ArrowLeft: () => move(-part), ArrowRight: () => move(part), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), 0: all };
  if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
});
function all() { from = 0; to = end; requestAnimationFrame(draw); }
document.getElementById("in").onclick = () => zoom(0.7);
document.getElementById("out").onclick = () => zoom(1.4);
document.getElementById("all").onclick = all;
search.addEventListener("input", () => {
  query = search.value.trim().toLowerCase();
  const hits = data.spans.map((s, i) => i).filter((i) => matches(data.labels[data.spans[i][4]]));
  found.textContent = query ? hits.length + " found" : "";
  if (hits.length) show(hits[0]);
  draw();
});
for (const table of document.querySelectorAll("table")) {
  table.tHead.querySelectorAll("button").forEach((button, column) => {
    let up = false;
    button.onclick = () => {
      up = !up;
      const units = { us: 1e-6, ms: 1e-3, s: 1, B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };
      const key = (row) => {
        const text = row.cells[column].textContent, m = text.match(/^(-?[\d.e+-]+) ?(us|ms|s|B|kB|MB|GB|%)?$/);
        return m ? parseFloat(m[1]) * (units[m[2]] || 1) : text;
      };
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => { const x = key(a), y = key(b); return (x > y ? 1 : x < y ? -1 : 0) * (up ? -1 : 1); });
      table.tBodies[0].append(...rows);
    };
  });
}
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.body.dataset.drawn = String(data.spans.length);
