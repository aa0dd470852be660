// The graph of a model: nested modules that open and close, laid out by dagre, coloured by what they cost.

import { bytes, colour, count, el, isNumber, panel, percent, segments, svg } from "./dom.js";
import { ask, runPath } from "./net.js";

const COLOURINGS = { forward_s: "Forward", backward_s: "Backward", parameters: "Parameters", output_bytes: "Memory", flops: "FLOP" };
const [WIDTH, HEIGHT] = [168, 44];
const SHAPES_BELOW = 60; // edges; of more the shapes would hide the graph

const seconds = (value) => (value < 1e-3 ? `${(1e6 * value).toFixed(0)} µs` : `${(1e3 * value).toFixed(2)} ms`);
const SHOWN = { forward_s: seconds, backward_s: seconds, parameters: count, output_bytes: bytes, flops: (value) => `${(value / 1e6).toFixed(2)} MFLOP` };

export function graphPanel(run) {
  const place = el("div", {}, el("button", { type: "button", id: "graph", onclick: open }, "Show the graph"));
  const { root, header } = panel("The model's graph", "", place);

  async function open() {
    place.replaceChildren(el("p", { class: "quiet" }, "building the model and measuring its layers …"));
    try {
      const [graph] = await Promise.all([ask(runPath(run.name, "/graph")), loaded("/static/vendor/dagre-3.1.3.min.js")]);
      const view = new GraphView(graph);
      header.append(el("span", { class: "spacer" }), view.search, segments("Coloured by", view.colourings, view.by, (value) => { view.by = value; view.draw(); }));
      place.replaceChildren(view.root);
      view.draw();
      view.fit();
    } catch (error) {
      place.replaceChildren(el("p", { class: "problem" }, error.message));
    }
  }
  return { root, draw: () => { root.hidden = !run.plan; } };
}

function loaded(path) {
  if (window.dagre) return Promise.resolve();
  return new Promise((resolve, reject) => {
    document.head.append(el("script", { src: path, onload: resolve, onerror: () => reject(new Error(`${path} could not be loaded`)) }));
  });
}

class GraphView {
  constructor(graph) {
    this.graph = graph;
    this.nodes = new Map(graph.nodes.map((node) => [node.id, node]));
    this.open = new Set();
    this.found = "";
    this.colourings = Object.fromEntries(Object.entries(COLOURINGS).filter(([key]) => graph.nodes.some((node) => node[key])));
    this.by = Object.keys(this.colourings)[0];
    this.total = Object.fromEntries(Object.keys(this.colourings).map((key) => [key, graph.nodes.filter((node) => node.is_leaf).reduce((sum, node) => sum + (node[key] ?? 0), 0)]));
    this.picture = svg("svg", { role: "group", "aria-label": `${graph.model}: ${graph.nodes.length} nodes; a module opens with Enter`, tabindex: 0 });
    this.readout = el("p", { class: "readout", "aria-live": "polite" }, `${graph.model}, ${count(graph.parameters)} parameters (${bytes(graph.parameter_bytes)}), shapes for a batch of ${graph.batch}${graph.note ? `; only the modules: ${graph.note}` : ""}`);
    this.search = el("input", { type: "search", placeholder: "Find a layer", "aria-label": "Find a layer", oninput: () => this.find() });
    this.search.style.width = "11rem";
    const button = (text, label, act) => el("button", { type: "button", class: "small", "aria-label": label, onclick: act }, text);
    this.root = el("div", {}, el("div", { class: "graph" }, this.picture),
      el("div", { class: "row" }, button("+", "Zoom in", () => this.zoom(0.8)), button("−", "Zoom out", () => this.zoom(1.25)), button("Fit", "Fit the graph", () => this.fit()),
        button("Open all", "Open all modules", () => { for (const node of this.graph.nodes) if (!node.is_leaf) this.open.add(node.id); this.draw(); this.fit(); }),
        button("Close all", "Close all modules", () => { this.open.clear(); this.draw(); this.fit(); }), this.readout));
    this.box = { x: 0, y: 0, width: 600, height: 400 };
    this.hands();
  }

  // A node is seen where all modules around it are open; of the others the outermost closed one stands for it.
  seen(id) {
    let shown = id;
    for (let node = this.nodes.get(id); node?.parent; node = this.nodes.get(node.parent)) if (!this.open.has(node.parent)) shown = node.parent;
    return shown;
  }

  cost(node, key) {
    if (node.is_leaf || isNumber(node[key]) && node[key] > 0 && key !== "parameters") return node[key] ?? 0;
    return this.graph.nodes.filter((one) => one.is_leaf && one.id.startsWith(`${node.id}.`)).reduce((sum, one) => sum + (one[key] ?? 0), 0);
  }

  draw() {
    const layout = new dagre.graphlib.Graph({ compound: true, multigraph: false });
    layout.setGraph({ rankdir: "TB", nodesep: 26, ranksep: 34, marginx: 16, marginy: 16 });
    layout.setDefaultEdgeLabel(() => ({}));
    for (const node of this.graph.nodes) {
      if (this.seen(node.id) !== node.id) continue;
      const isOpen = this.open.has(node.id);
      layout.setNode(node.id, isOpen ? { isOpen } : { width: WIDTH, height: HEIGHT });
      if (node.parent) layout.setParent(node.id, node.parent);
    }
    for (const edge of this.graph.edges) {
      const [source, target] = [this.seen(edge.source), this.seen(edge.target)];
      if (source !== target && layout.hasNode(source) && layout.hasNode(target) && !this.open.has(source) && !this.open.has(target)) layout.setEdge(source, target, { shape: edge.shape });
    }
    dagre.layout(layout);
    const size = layout.graph();
    this.size = { width: size.width || 1, height: size.height || 1 };
    const parts = [svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z", fill: colour("faint"), stroke: "none", class: "tip" })))];
    const groups = layout.nodes().filter((id) => this.open.has(id)).sort((a, b) => a.length - b.length);
    for (const id of groups) parts.push(this.group(id, layout.node(id)));
    for (const edge of layout.edges()) parts.push(...this.edge(layout.edge(edge), layout.edgeCount()));
    const most = Math.max(...layout.nodes().filter((id) => !this.open.has(id)).map((id) => this.cost(this.nodes.get(id), this.by)), 1e-12);
    for (const id of layout.nodes()) if (!this.open.has(id)) parts.push(this.node(id, layout.node(id), most));
    this.picture.replaceChildren(...parts);
    this.look();
  }

  group(id, { x, y, width, height }) {
    const title = svg("text", { x: x - width / 2 + 9, y: y - height / 2 + 16 });
    title.textContent = `${this.nodes.get(id).name} · close`;
    return this.pressed(svg("g", { class: "group node" }, svg("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 9 }), title), id);
  }

  edge({ points, shape }, edges) {
    const path = points.map(({ x, y }, at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const made = [svg("path", { d: path, "marker-end": "url(#arrow)" })];
    if (shape && edges <= SHAPES_BELOW) {
      const middle = points[Math.floor(points.length / 2)];
      const text = svg("text", { class: "small", x: middle.x + 5, y: middle.y + 3 });
      text.textContent = shape.slice(1).join("×");
      made.push(text);
    }
    return made;
  }

  node(id, { x, y }, most) {
    const node = this.nodes.get(id);
    const cost = this.cost(node, this.by);
    const box = svg("rect", { x: x - WIDTH / 2, y: y - HEIGHT / 2, width: WIDTH, height: HEIGHT, rx: 8 });
    box.style.fill = `color-mix(in srgb, ${colour("wait")} ${Math.round(75 * Math.sqrt(cost / most))}%, ${colour("surface")})`;
    const name = svg("text", { x, y: y - 3, "text-anchor": "middle" });
    name.textContent = cut(node.name + (node.is_leaf ? "" : " …"), 24);
    const below = svg("text", { class: "small", x, y: y + 13, "text-anchor": "middle" });
    below.textContent = cut(node.kind, 26);
    const title = svg("title");
    title.textContent = this.told(node);
    return this.pressed(svg("g", { class: `node${this.found && id.toLowerCase().includes(this.found) ? " found" : ""}` }, box, name, below, title), id);
  }

  pressed(group, id) {
    const act = () => {
      if (this.moved) return;
      const node = this.nodes.get(id);
      this.readout.textContent = this.told(node);
      if (node.is_leaf) return;
      if (this.open.has(id)) { for (const one of [...this.open]) if (one === id || one.startsWith(`${id}.`)) this.open.delete(one); } else this.open.add(id);
      this.draw();
      this.fit();
    };
    group.setAttribute("tabindex", "0");
    group.setAttribute("role", "button");
    group.setAttribute("aria-label", this.told(this.nodes.get(id)));
    group.addEventListener("click", act);
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } });
    return group;
  }

  told(node) {
    const costs = Object.keys(this.colourings).map((key) => [key, this.cost(node, key)]).filter(([, value]) => value > 0)
      .map(([key, value]) => `${COLOURINGS[key].toLowerCase()} ${SHOWN[key](value)}${this.total[key] ? ` (${percent(value / this.total[key], 0)})` : ""}`);
    const shapes = (node.output_shapes ?? []).map((shape) => shape.join("×")).join(", ");
    return [`${node.id}: ${node.kind}${node.settings ? `(${node.settings})` : ""}`, shapes && `gives ${shapes}`, ...costs].filter(Boolean).join("; ");
  }

  find() {
    this.found = this.search.value.trim().toLowerCase();
    if (this.found) {
      for (const node of this.graph.nodes) {
        if (!node.id.toLowerCase().includes(this.found)) continue;
        for (let parent = node.parent; parent; parent = this.nodes.get(parent)?.parent) this.open.add(parent);
      }
    }
    this.draw();
    this.fit();
  }

  fit() {
    const { clientWidth: width, clientHeight: height } = this.picture;
    const scale = Math.max(this.size.width / Math.max(width, 1), this.size.height / Math.max(height, 1), 0.8);
    this.box = { width: width * scale, height: height * scale };
    this.box.x = (this.size.width - this.box.width) / 2;
    this.box.y = scale > 2 ? 0 : (this.size.height - this.box.height) / 2;
    if (scale > 2) { this.box = { width: width * 1.2, height: height * 1.2, y: 0 }; this.box.x = (this.size.width - this.box.width) / 2; }
    this.look();
  }

  zoom(factor) {
    const { x, y, width, height } = this.box;
    this.box = { x: x + (width * (1 - factor)) / 2, y: y + (height * (1 - factor)) / 2, width: width * factor, height: height * factor };
    this.look();
  }

  look() {
    const { x, y, width, height } = this.box;
    this.picture.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
  }

  // Dragging, the wheel, and arrow keys.
  hands() {
    let from = null;
    this.picture.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; this.moved = false; });
    this.picture.addEventListener("pointermove", (event) => {
      if (!from || !event.buttons) return;
      const scale = this.box.width / this.picture.clientWidth;
      const [x, y] = [event.clientX - from[0], event.clientY - from[1]];
      if (Math.hypot(x, y) > 4) this.moved = true;
      if (!this.moved) return;
      this.box.x -= x * scale;
      this.box.y -= y * scale;
      from = [event.clientX, event.clientY];
      this.look();
    });
    this.picture.addEventListener("pointerup", () => { from = null; });
    this.picture.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) { this.box.y += (event.deltaY * this.box.width) / this.picture.clientWidth; this.look(); } else this.zoom(event.deltaY > 0 ? 1.1 : 0.9);
      event.preventDefault();
    }, { passive: false });
    this.picture.addEventListener("keydown", (event) => {
      const moves = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
      if (event.key === "+") this.zoom(0.8);
      else if (event.key === "-") this.zoom(1.25);
      else if (moves[event.key]) {
        this.box.x += moves[event.key][0] * this.box.width * 0.1;
        this.box.y += moves[event.key][1] * this.box.height * 0.1;
        this.look();
      } else return;
      event.preventDefault();
    });
  }
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
