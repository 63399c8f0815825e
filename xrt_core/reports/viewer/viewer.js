/* The viewer of a partition: draws the boxes and lines that xrt_core/reports/html.py has placed, by Cytoscape.js. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const canvas = at("canvas"), panel = at("panel"), search = at("search"), found = at("found"), views = at("views");
  const boxes = data.boxes.map(([kind, label, detail, space, cluster, tip]) =>
    ({ kind, label, detail, space, cluster, tip }));
  const height = data.height, most = 50;
  let current = 0, shape = "", fitted = 0, picked = null, options = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const cut = (text, width) => {
    const room = Math.floor((width - 12) / data.character);
    return text.length > room ? text.slice(0, Math.max(room - 1, 1)) + "…" : text;
  };
  const style = () => [
    { selector: "node", style: {
      shape: "round-rectangle", width: "data(w)", height: height, label: "data(text)", "text-wrap": "wrap",
      "text-valign": "center", "font-family": "ui-monospace, monospace", "font-size": 11, "line-height": 1.15,
      "background-color": "data(fill)", color: "#1c2733", "border-width": 1, "border-color": "#607d8b",
      "min-zoomed-font-size": 5, "text-max-width": "10000px" } },
    { selector: ".host", style: { "background-color": colour("--host"), color: colour("--host-text") } },
    { selector: ".host.single", style: { "border-style": "dashed" } },
    { selector: ".end", style: { "corner-radius": 17 } },
    { selector: ".outside", style: { opacity: 0.55 } },
    { selector: "edge", style: {
      width: 1.2, "line-color": colour("--edge"), "target-arrow-color": colour("--edge"), "target-arrow-shape": "triangle",
      "arrow-scale": 0.7, "source-endpoint": "0 50%", "target-endpoint": "0 -50%" } },
    { selector: "edge.straight", style: { "curve-style": "straight" } },
    { selector: "edge.bent", style: {
      "curve-style": "round-segments", "edge-distances": "endpoints", "segment-weights": "data(weights)",
      "segment-distances": "data(distances)", "segment-radii": 10 } },
    { selector: "edge.far", style: { "line-opacity": 0.45, "line-style": "dashed" } },
    { selector: ".faded", style: { opacity: 0.18 } },
    { selector: ".near", style: {
      "line-color": colour("--focus"), "target-arrow-color": colour("--focus"), "line-opacity": 1, width: 2.5,
      "z-index": 5 } },
    { selector: "node:selected", style: { "border-color": colour("--mark"), "border-width": 3, opacity: 1 } },
  ];
  const cy = window.cy = cytoscape({
    container: canvas, style: style(), layout: { name: "preset" }, autoungrabify: true, boxSelectionEnabled: false,
    minZoom: 0.01, maxZoom: 4, hideEdgesOnViewport: data.boxes.length > 4000 });

  /* A line through absolute points, as Cytoscape has it: relative to the straight line between its ends. */
  function bend(points) {
    const [sx, sy] = points, tx = points.at(-2), ty = points.at(-1);
    const dx = tx - sx, dy = ty - sy, length = Math.hypot(dx, dy) || 1, weights = [], distances = [];
    for (let i = 2; i < points.length - 2; i += 2) {
      const px = points[i] - sx, py = points[i + 1] - sy;
      weights.push(((px * dx + py * dy) / (length * length)).toFixed(5));
      distances.push(((py * dx - px * dy) / length).toFixed(2));
    }
    return { weights: weights.join(" "), distances: distances.join(" ") };
  }
  const wanted = () => (canvas.clientWidth >= canvas.clientHeight ? "wide" : "tall");

  function show(number, select) {
    const view = data.views[number], layout = view[shape = wanted()] || view.wide;
    current = number;
    picked = null;
    const elements = view.boxes.map((b, i) => {
      const [x, y, w] = layout.boxes[i], box = boxes[b];
      const text = [box.label, box.detail].filter(Boolean).map((line) => cut(line, w)).join("\n");
      const classes = [box.space === data.host ? "host" : "", box.kind === "input" || box.kind === "output" ? "end" : "",
        box.kind === "node" ? "single" : "", view.outside.includes(i) ? "outside" : ""].join(" ");
      return { group: "nodes", data: { id: "n" + i, box: b, w, text, fill: data.colours[box.space] },
        position: { x: x + w / 2, y: y + height / 2 }, classes };
    });
    view.edges.forEach(([source, target, text], i) => {
      const points = layout.lines[i], bent = points.length > 4;
      elements.push({ group: "edges", data: { id: "e" + i, source: "n" + source, target: "n" + target, said: text,
        ...(bent ? bend(points) : {}) }, classes: (bent ? "bent " : "straight ") + (layout.far.includes(i) ? "far" : "") });
    });
    cy.batch(() => { cy.elements().remove(); cy.add(elements); });
    describe(null);
    fit();
    views.options[0].textContent = view.title;
    views.value = view.listed ? String(number) : "";
    at("up").disabled = number === 0;
    mark();
    if (select !== undefined) pick(cy.nodes().filter((n) => n.data("box") === select).first(), true);
  }
  function fit() { cy.resize(); cy.fit(undefined, 14); if (cy.zoom() > 1.3) { cy.zoom(1.3); cy.center(); } fitted = cy.zoom(); }

  function pick(node, centre) {
    cy.nodes(":selected").unselect();
    cy.edges().removeClass("near");
    picked = node && node.length ? node : null;
    if (picked) {
      picked.select();
      picked.connectedEdges().addClass("near");
      if (centre) {
        const zoom = Math.max(cy.zoom(), 0.8);
        cy.stop();
        cy.zoom(zoom);
        cy.center(picked);
      }
    }
    describe(picked);
  }
  const line = (tag, text, name) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    panel.append(made);
    return made;
  };
  function links(title, nodes, action) {
    if (!nodes.length) return;
    line("h3", title);
    const list = line("ul", "");
    nodes.slice(0, most).forEach(([text, small, value]) => {
      const item = document.createElement("li"), button = document.createElement("button");
      button.textContent = text;
      if (small) { const s = document.createElement("small"); s.textContent = small; button.append(s); }
      button.addEventListener("click", () => action(value));
      item.append(button);
      list.append(item);
    });
    if (nodes.length > most) line("p", `and ${nodes.length - most} more`);
  }
  function describe(node) {
    panel.replaceChildren();
    if (!node) {
      const view = data.views[current];
      line("h2", view.title);
      line("p", `${view.boxes.length} boxes, ${view.edges.length} edges`);
      const help = line("div", "", "help");
      help.innerHTML = "<p>Click a box for what it is, and for the reason of a host node; double-click a cluster to open " +
        "it.</p><h3>Keyboard</h3><p><kbd>/</kbd> search\n<kbd>Tab</kbd> to the picture, <kbd>←</kbd> <kbd>↑</kbd> " +
        "<kbd>→</kbd> <kbd>↓</kbd> the next box\n<kbd>Enter</kbd> open, <kbd>Esc</kbd> back\n" +
        "<kbd>+</kbd> <kbd>-</kbd> zoom, <kbd>0</kbd> fit</p>";
      return;
    }
    const b = node.data("box"), box = boxes[b];
    line("h2", box.kind === "node" && box.detail ? `${box.label} ${box.detail}` : box.label);
    box.tip.split("\n").slice(box.kind === "node" ? 1 : 0, 60).forEach((text) => line("p", text));
    (data.facts[box.cluster] || []).forEach((text) => line("p", text));
    const inner = data.opens[b];
    if (inner !== undefined && inner !== current) {
      const open = line("button", `Open its ${data.views[inner].inner} nodes`);
      open.id = "open";
      open.addEventListener("click", () => show(inner));
    }
    const end = (edge, side) => [boxes[edge[side]().data("box")].label, edge.data("said"), edge[side]()];
    links("Reads", node.incomers("edge").map((e) => end(e, "source")), (n) => pick(n, true));
    links("Read by", node.outgoers("edge").map((e) => end(e, "target")), (n) => pick(n, true));
  }
  const open = (node) => {
    const inner = node ? data.opens[node.data("box")] : undefined;
    if (inner !== undefined && inner !== current) show(inner);
  };
  function up() { if (current !== 0) show(0, data.views[current].of); }

  /* The box that lies nearest in a direction: distance along it, and twice the distance across. */
  function move(dx, dy) {
    if (!picked) return pick(cy.nodes().first(), true);
    const from = picked.position();
    let best = null, least = Infinity;
    cy.nodes().forEach((n) => {
      const x = n.position("x") - from.x, y = n.position("y") - from.y;
      const along = x * dx + y * dy, off = Math.abs(x * dy) + Math.abs(y * dx);
      if (along > 1 && along + 2 * off < least) { best = n; least = along + 2 * off; }
    });
    if (best) pick(best, true);
  }
  const zoom = (factor) => cy.zoom({ level: cy.zoom() * factor,
    renderedPosition: picked ? picked.renderedPosition() : { x: cy.width() / 2, y: cy.height() / 2 } });

  /* Search: over every box of every view; what matches in this view stays bright. */
  const matches = (box, words) => {
    const text = `${box.label} ${box.detail} ${box.cluster} ${box.tip}`.toLowerCase();
    return words.every((w) => text.includes(w));
  };
  function mark() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    options = [];
    cy.elements().removeClass("faded");
    found.hidden = !words.length;
    search.setAttribute("aria-expanded", String(words.length > 0));
    search.removeAttribute("aria-activedescendant");
    found.replaceChildren();
    if (!words.length) return;
    const hits = boxes.map((_, i) => i).filter((i) => data.home[i] !== undefined && matches(boxes[i], words));
    const hit = new Set(hits);
    cy.nodes().forEach((n) => {
      const members = data.members[n.data("box")] || [];
      if (!hit.has(n.data("box")) && !members.some((m) => hit.has(m))) n.addClass("faded");
    });
    cy.edges().addClass("faded");
    hits.slice(0, most).forEach((b, i) => {
      const item = document.createElement("li"), box = boxes[b], small = document.createElement("small");
      item.id = "option" + i;
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", "false");
      item.textContent = [box.label, box.detail].filter(Boolean).join("  ");
      small.textContent = box.tip.split("\n").slice(1).join("; ").slice(0, 160);
      item.append(small);
      item.addEventListener("click", () => reveal(b));
      found.append(item);
      options.push(b);
    });
    const end = document.createElement("li");
    end.textContent = hits.length ? `${Math.min(hits.length, most)} of ${hits.length}` : "nothing found";
    end.id = "count";
    found.append(end);
  }
  let choice = -1;
  function choose(step) {
    if (!options.length) return;
    found.children[choice]?.setAttribute("aria-selected", "false");
    choice = (choice + step + options.length) % options.length;
    found.children[choice].setAttribute("aria-selected", "true");
    found.children[choice].scrollIntoView({ block: "nearest" });
    search.setAttribute("aria-activedescendant", "option" + choice);
  }
  function reveal(b) {
    search.value = "";
    show(data.views[current].boxes.includes(b) ? current : data.home[b], b);
    canvas.focus();
  }
  search.addEventListener("input", () => { choice = -1; mark(); });
  search.addEventListener("keydown", (e) => {
    if (e.key === "ArrowDown") choose(1);
    else if (e.key === "ArrowUp") choose(-1);
    else if (e.key === "Enter") { if (options.length) reveal(options[Math.max(choice, 0)]); }
    else if (e.key === "Escape") { search.value = ""; mark(); canvas.focus(); }
    else return;
    e.preventDefault();
  });
  const keys = {
    ArrowLeft: () => move(-1, 0), ArrowRight: () => move(1, 0), ArrowUp: () => move(0, -1), ArrowDown: () => move(0, 1),
    Enter: () => open(picked), Escape: () => (picked && current === 0 ? pick(null) : up()), Backspace: up,
    "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3), 0: fit,
  };
  canvas.addEventListener("keydown", (e) => {
    if (!keys[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
    keys[e.key]();
    e.preventDefault();
  });
  document.addEventListener("keydown", (e) => {
    if (e.key !== "/" || e.target === search) return;
    search.focus();
    e.preventDefault();
  });
  cy.on("tap", "node", (e) => pick(e.target, false));
  cy.on("tap", (e) => { if (e.target === cy) pick(null); });
  cy.on("dbltap", "node", (e) => open(e.target));
  at("in").addEventListener("click", () => zoom(1.3));
  at("out").addEventListener("click", () => zoom(1 / 1.3));
  at("fit").addEventListener("click", fit);
  at("up").addEventListener("click", up);
  views.addEventListener("change", () => show(Number(views.value)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => cy.style(style()));
  let waiting = 0;
  new ResizeObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (wanted() !== shape) show(current, picked?.data("box"));
      else if (cy.zoom() === fitted) fit();
      else cy.resize();
    }, 100);
  }).observe(canvas);
  show(0);
  cy.one("render", () => document.documentElement.setAttribute("data-ready", String(Math.round(performance.now()))));
})();
