// Weights and gradients of each layer: norms, and how the values are spread.

import { count, el, isNumber, panel, short, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [150, 30];

export function layersPanel(run) {
  const place = el("div", { class: "scroll" });
  const told = el("p", { class: "quiet" });
  const { root, header } = panel("Weights and gradients by layer", "", place);
  header.append(el("span", { class: "spacer" }), told);
  let drawn = "";

  function draw() {
    const layers = run.layers?.layers ?? [];
    root.hidden = !layers.length;
    const key = `${run.layers?.step} ${layers.length}`;
    if (!layers.length || key === drawn) return;
    drawn = key;
    told.textContent = `after step ${count(run.layers.step)}`;
    const head = ["Layer", "Norm of the weights", "Weights", "Norm of the gradient", "Gradient"];
    place.replaceChildren(el("table", { class: "table layers" },
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, layers.map((layer) => el("tr", {}, el("th", { scope: "row" }, String(layer.name)),
        el("td", {}, short(layer.weight_norm)), el("td", {}, spread(layer.weight_counts, layer.weight_range)),
        el("td", {}, short(layer.gradient_norm)), el("td", {}, spread(layer.gradient_counts, layer.gradient_range)))))));
  }
  return { root, draw };
}

// A histogram as small as a word.
function spread(counts, range) {
  if (!Array.isArray(counts) || !counts.every(isNumber) || !Array.isArray(range)) return "–";
  const most = Math.max(...counts, 1);
  const wide = WIDTH / counts.length;
  const label = `${short(range[0])} … ${short(range[1])}`;
  const bars = counts.map((times, at) => svg("rect", { x: at * wide, width: Math.max(wide - 1, 0.5), y: HEIGHT * (1 - times / most), height: (HEIGHT * times) / most }));
  return el("span", { class: "spread" }, svg("svg", { width: WIDTH, height: HEIGHT, role: "img", "aria-label": `values from ${label}` }, ...bars), el("small", { class: "quiet" }, label));
}
