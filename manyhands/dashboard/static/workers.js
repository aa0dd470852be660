// Where the time of each worker goes: bars for a few workers; for many, a picture of all of them over time, and the
// least, the median and the greatest. A thousand workers are never a thousand lines.

import { behind, bytes, clock, colour, count, el, moment, panel, percent, segments } from "./dom.js";
import { ask, runPath } from "./net.js";
import { Plot } from "./plot.js";

const NAMES = { compute: "computing", input: "its batch", wait: "waiting", exchange: "exchange", update: "update", other: "other" };
const KINDS = { wait: "Waiting", compute: "Computing", input: "Batch", exchange: "Exchange", update: "Update", samples: "Samples/s" };
const FEW = 32;
const HEAT_HEIGHT = 320;

export function workersPanel(run) {
  let since = "recent";
  const bars = el("div", { class: "workers" });
  const total = el("div", { class: "workers" });
  const legend = el("div", { class: "legend" }, Object.entries(NAMES).map(([part, name]) => el("span", { class: `mark-${part}` }, name)));
  const table = behind(() => ({
    head: ["worker", ...Object.values(NAMES), "samples/s", "step"],
    body: (run.workers?.rows ?? []).map((row) => [row.rank, ...row[since].map((share) => percent(share)), count(row.rate), count(row.step)]),
  }));
  const heat = new Heat(run);
  const { root, header } = panel("Where the time goes", "", legend, total, bars, heat.root, table);
  header.append(el("span", { class: "spacer" }), segments("Over", { recent: "Lately", ever: "Whole run" }, since, (value) => { since = value; draw(); }));

  function stack(shares) {
    const parts = Object.keys(NAMES);
    return el("div", { class: "stack", role: "img", "aria-label": parts.map((part, at) => `${NAMES[part]} ${percent(shares[at], 0)}`).join(", ") },
      shares.map((share, at) => el("i", { class: `mark-${parts[at]}`, "width%": 100 * share, title: `${NAMES[parts[at]]} ${percent(share)}` })));
  }

  function draw() {
    const workers = run.workers;
    root.hidden = !workers?.count;
    if (!workers?.count) return;
    const rows = workers.rows.length <= FEW ? workers.rows : [];
    const mean = workers.mean;
    total.replaceChildren(...(workers.count > 1 && mean ? [el("span", { class: "label" }, "all"), stack(mean), el("span"), el("span")] : []));
    total.hidden = rows.length > 0;
    bars.replaceChildren(...rows.flatMap((row) => [
      el("span", { class: `label${row.is_gone ? " gone" : ""}` }, `worker ${row.rank}`), stack(row[since]),
      el("span", { class: "value" }, `${count(row.rate)}/s`), el("span", { class: "value" }, bytes(row.memory_bytes))]));
    heat.root.hidden = workers.count < 2;
    table.hidden = !rows.length;
    heat.draw(workers.count);
  }
  return { root, draw, leave: () => heat.leave() };
}

class Heat {
  constructor(run) {
    this.run = run;
    this.what = "wait";
    this.shades = null;
    this.shape = { workers: 0, columns: 0, width: 1, start: 0 };
    this.at = null;
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Each worker over time; arrow keys move the cursor",
      onmousemove: (event) => this.point(event), onmouseleave: () => this.tell(null), onkeydown: (event) => this.key(event) });
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.axis = el("div", { class: "axis" });
    this.band = new Plot([{ name: "median worker", colour: "c1", band: true, format: (value) => this.named(value) }],
      { label: "Least, median and greatest of all workers", height: 130, from0: true, xLabel: "time", xFormat: moment, yFormat: (value) => this.named(value) });
    this.root = el("div", { class: "heat" },
      el("div", { class: "row" }, el("h3", {}, "Each worker over time"), el("span", { class: "spacer" }),
        segments("Show", KINDS, this.what, (value) => { this.what = value; this.shades = null; this.next = 0; this.draw(this.shape.workers); })),
      this.readout, this.canvas, this.axis, this.band.root);
    this.next = 0;
    this.onTheme = () => this.paint();
    addEventListener("theme", this.onTheme);
  }

  leave() {
    removeEventListener("theme", this.onTheme);
    this.band.destroy();
  }

  named(value) {
    return value === null || value === undefined ? "–" : this.what === "samples" ? percent(value, 0) : percent(value, 0);
  }

  // Only what is new: columns from the last one on, as long as their width is the same.
  async draw() {
    if (Date.now() < this.next || this.root.hidden) return;
    this.next = Date.now() + 1000;
    const first = this.shades ? Math.max(0, this.shape.columns - 2) : 0;
    const answer = await ask(runPath(this.run.name, `/workers?what=${this.what}&first=${first}`), { raw: true }).catch(() => null);
    if (!answer?.ok) return;
    const get = (name) => Number(answer.headers.get(`X-${name}`));
    const shape = { workers: get("Workers"), columns: get("Columns"), width: get("Width"), start: get("Start") };
    const came = new Uint8Array(await answer.arrayBuffer());
    const begin = get("First");
    if (this.shades && begin > 0 && (shape.width !== this.shape.width || shape.workers !== this.shape.workers)) {
      this.shades = null; // columns have become wider: all of them are needed
      this.next = 0;
      return;
    }
    const shades = new Uint8Array(shape.workers * shape.columns).fill(255);
    for (let rank = 0; rank < shape.workers; rank += 1) {
      if (this.shades && begin > 0) shades.set(this.shades.subarray(rank * this.shape.columns, rank * this.shape.columns + begin), rank * shape.columns);
      shades.set(came.subarray(rank * (shape.columns - begin), (rank + 1) * (shape.columns - begin)), rank * shape.columns + begin);
    }
    this.shades = shades;
    this.shape = shape;
    this.paint();
  }

  // At most a pixel a row: of several workers in one row the greatest is shown, so that none is lost.
  paint() {
    const { workers, columns, width, start } = this.shape;
    if (!this.shades || !columns) return;
    const rows = Math.min(workers, HEAT_HEIGHT);
    const colours = ramp(colour("raised"), colour(this.what === "samples" ? "exchange" : this.what));
    const image = new ImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let row = 0; row < rows; row += 1) {
      const [from, to] = [Math.floor((row * workers) / rows), Math.floor(((row + 1) * workers) / rows)];
      for (let column = 0; column < columns; column += 1) {
        let most = -1;
        for (let rank = from; rank < to; rank += 1) {
          const shade = this.shades[rank * columns + column];
          if (shade !== 255 && shade > most) most = shade;
        }
        if (most >= 0) pixels[row * columns + column] = colours[most];
      }
    }
    this.canvas.width = columns;
    this.canvas.height = rows;
    this.canvas.style.height = `${Math.min(HEAT_HEIGHT, Math.max(40, rows * 14))}px`;
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    this.axis.replaceChildren(el("span", {}, clock(start)), el("span", {}, `${count(workers)} workers`), el("span", {}, clock(start + width * columns)));
    this.band.set(this.ranges());
    if (this.at) this.tell(this.at);
  }

  // By counting shades, which is fast enough for a thousand workers in every frame.
  ranges() {
    const { workers, columns, width } = this.shape;
    const [x, median, low, high] = [[], [], [], []];
    const bins = new Uint32Array(255);
    for (let column = 0; column < columns; column += 1) {
      bins.fill(0);
      let known = 0;
      for (let rank = 0; rank < workers; rank += 1) {
        const shade = this.shades[rank * columns + column];
        if (shade !== 255) { bins[shade] += 1; known += 1; }
      }
      if (!known) continue;
      let [seen, least, greatest, middle] = [0, -1, 0, -1];
      for (let shade = 0; shade < 255; shade += 1) {
        if (!bins[shade]) continue;
        if (least < 0) least = shade;
        greatest = shade;
        seen += bins[shade];
        if (middle < 0 && 2 * seen >= known) middle = shade;
      }
      x.push(column * width); median.push(middle / 254); low.push(least / 254); high.push(greatest / 254);
    }
    return [x, median, low, high];
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.tell({
      rank: Math.floor(((event.clientY - box.top) / box.height) * this.shape.workers),
      column: Math.floor(((event.clientX - box.left) / box.width) * this.shape.columns),
    });
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const { rank, column } = this.at ?? { rank: 0, column: this.shape.columns - 1 };
    this.tell({ rank: rank + move[0], column: column + move[1] });
  }

  tell(place) {
    if (!place || !this.shades) { this.readout.textContent = ""; this.at = null; return; }
    const { workers, columns, width, start } = this.shape;
    const rank = Math.min(Math.max(place.rank, 0), workers - 1);
    const column = Math.min(Math.max(place.column, 0), columns - 1);
    this.at = { rank, column };
    const shade = this.shades[rank * columns + column];
    const value = shade === 255 ? "nothing recorded" : this.what === "samples" ? `${percent(shade / 254, 0)} of the fastest` : `${NAMES[this.what]} ${percent(shade / 254, 0)}`;
    this.readout.textContent = `worker ${rank}, ${clock(start + column * width)}: ${value}`;
  }
}

// 255 colours from one to another, as a canvas has them in memory.
function ramp(from, to) {
  const parse = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [parse(from), parse(to)];
  return Uint32Array.from({ length: 255 }, (_, shade) => {
    const part = Math.pow(shade / 254, 0.8);
    const [red, green, blue] = a.map((value, at) => Math.round(value + (b[at] - value) * part));
    return (255 << 24) | (blue << 16) | (green << 8) | red;
  });
}
