// Curves with uPlot: a mean, and the range from the least to the greatest value that the server keeps for each column,
// so that a spike of one step is seen however long the run is.

import { behind, colour, el, isNumber, short } from "./dom.js";

const HEIGHT = 240;

export class Plot {
  // lines: [{name, colour, band, points, dash, format}]; options: {log, from0, height, xFormat, onZoom}
  constructor(lines, options = {}) {
    this.lines = lines;
    this.options = options;
    this.data = [[]];
    this.isZoomed = false;
    this.box = el("div", { class: "plot", role: "img", "aria-label": options.label ?? lines.map((line) => line.name).join(", ") });
    this.root = el("div", {}, this.box, behind(() => this.table()));
    this.onTheme = () => this.build();
    addEventListener("theme", this.onTheme);
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.box);
  }

  destroy() {
    removeEventListener("theme", this.onTheme);
    this.watcher.disconnect();
    this.plot?.destroy();
  }

  // One series for a line, and two more for its range.
  build() {
    const width = this.box.clientWidth;
    if (!width) return;
    this.plot?.destroy();
    const grid = { stroke: colour("line"), width: 1 };
    const axis = { stroke: colour("faint"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 6 };
    const format = this.options.xFormat;
    const xFormat = (self, values) => values.map((value) => (value === null ? "" : format ? format(value) : short(value)));
    const series = [{ label: this.options.xLabel ?? "step", value: (self, value) => (value === null ? "–" : format ? format(value) : short(value)) }];
    const bands = [];
    for (const line of this.lines) {
      const stroke = colour(line.colour);
      series.push({
        label: line.name, stroke: line.isFaint ? mixed(stroke, "55") : stroke, width: line.isFaint ? 1 : 1.75, dash: line.dash, spanGaps: !this.options.keepsGaps,
        points: { show: Boolean(line.points), size: 6, fill: stroke }, value: (self, value) => (line.format ?? short)(value),
      });
      if (line.band) {
        const faint = { stroke: `color-mix(in srgb, ${stroke} 40%, transparent)`, width: 1, points: { show: false }, spanGaps: true };
        series.push({ ...faint, label: "least", stroke: mixed(stroke), value: (self, value) => short(value) });
        series.push({ ...faint, label: "greatest", stroke: mixed(stroke), value: (self, value) => short(value) });
        bands.push({ series: [series.length - 1, series.length - 2], fill: mixed(stroke, "2e") });
      }
    }
    this.plot = new uPlot({
      width, height: this.options.height ?? HEIGHT, series, bands,
      cursor: { drag: { x: true, y: false }, points: { size: 7 }, sync: this.options.sync ? { key: this.options.sync } : undefined },
      scales: {
        x: { time: false },
        y: { distr: this.options.log ? 3 : 1, range: this.options.range ?? (this.options.log ? undefined : (self, low, high) => this.span(low, high)) },
      },
      axes: [{ ...axis, values: xFormat, size: 28, space: 72 }, { ...axis, size: 58, values: (self, values) => values.map((value) => (value === null ? "" : (this.options.yFormat ?? short)(value))) }],
      hooks: { setScale: [(self, key) => { if (key === "x") this.zoomed(self.scales.x); }] },
    }, this.data, this.box);
    this.plot.over.addEventListener("dblclick", () => { this.isZoomed = false; this.options.onZoom?.(null); });
  }

  span(low, high) {
    if (!isNumber(low) || !isNumber(high)) return [0, 1];
    if (this.options.from0) low = Math.min(low, 0);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [this.options.from0 && low === 0 ? 0 : low - room, high + room];
  }

  zoomed(scale) {
    const xs = this.whole?.[0] ?? this.data[0];
    if (this.isSetting || !xs.length || !isNumber(scale.min)) return;
    const isZoomed = scale.min > xs[0] || scale.max < xs[xs.length - 1];
    if (!isZoomed) return;
    this.isZoomed = true;
    this.options.onZoom?.(scale.min, scale.max);
  }

  set(data) {
    this.whole = data;
    if (!this.isZoomed) this.draw(data, true);
  }

  // What a zoom has brought; the range of the axis stays as it was dragged.
  detail(data) {
    if (this.isZoomed && data[0].length) this.draw(data, false);
  }

  draw(data, isWhole) {
    this.data = data;
    if (!this.plot) this.build();
    if (!this.plot) return;
    this.isSetting = true;
    const { min, max } = this.plot.scales.x;
    this.plot.setData(data, isWhole);
    if (!isWhole) this.plot.setScale("x", { min, max });
    this.isSetting = false;
    if (!(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx: data[0].length - 1 }, false);
  }

  resize() {
    const width = this.box.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: this.options.height ?? HEIGHT });
    else this.build();
  }

  table() {
    const head = [this.options.xLabel ?? "step", ...this.lines.flatMap((line) => (line.band ? [line.name, "least", "greatest"] : [line.name]))];
    const length = this.data[0].length;
    const stride = Math.max(1, Math.ceil(length / 60));
    const rows = [];
    for (let at = 0; at < length; at += stride) {
      rows.push(this.data.map((column, number) => (number === 0 && this.options.xFormat ? this.options.xFormat(column[at]) : column[at])));
    }
    return { head, body: rows };
  }
}

// A canvas does not know color-mix everywhere: the colours are six hexadecimal digits, and two more make them faint.
function mixed(stroke, faintness = "66") {
  return /^#[0-9a-f]{6}$/i.test(stroke) ? stroke + faintness : stroke;
}

// Several curves on the union of their places on the axis.
export function joined(tables) {
  return uPlot.join(tables);
}
