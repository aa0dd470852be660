// Which classes are taken for which: a row for each true class.

import { behind, colour, count, el, panel, percent } from "./dom.js";

const MOST_CLASSES = 40;

export function confusionPanel(run) {
  const place = el("div", { class: "confusion", tabindex: "0" });
  const told = el("p", { class: "quiet" });
  const table = behind(() => ({
    head: ["class", "samples", "precision", "recall", "F1"],
    body: (run.classes?.per_class ?? []).map((one) => [one.name, count(one.samples), percent(one.precision), percent(one.recall), percent(one.f1)]),
  }));
  const { root, header } = panel("Confusion matrix", "", place, table);
  header.append(el("span", { class: "spacer" }), told);
  let drawn = "";

  function draw() {
    const record = run.classes;
    const matrix = counts(record);
    root.hidden = !matrix;
    const key = JSON.stringify(matrix) + document.documentElement.dataset.theme;
    if (!matrix || key === drawn) return;
    drawn = key;
    const size = Math.min(matrix.length, MOST_CLASSES);
    const name = (at) => String(record.per_class?.[at]?.name ?? at);
    const mixedUp = matrix.flatMap((row, truth) => row.map((times, taken) => ({ truth, taken, times }))).filter((one) => one.truth !== one.taken).sort((a, b) => b.times - a.times)[0];
    told.textContent = mixedUp?.times ? `most often ${name(mixedUp.truth)} is taken for ${name(mixedUp.taken)}: ${count(mixedUp.times)} times` : "no mistake";
    const [good, bad] = [colour("accent"), colour("bad")];
    place.replaceChildren(el("table", {},
      el("caption", { class: "quiet" }, `rows: what it is; columns: what the model says${record.step ? `; step ${count(record.step)}` : ""}`),
      el("thead", {}, el("tr", {}, el("td"), Array.from({ length: size }, (_, at) => el("th", { scope: "col" }, name(at))))),
      el("tbody", {}, matrix.slice(0, size).map((row, truth) => {
        const all = row.reduce((sum, times) => sum + times, 0) || 1;
        return el("tr", {}, el("th", { scope: "row" }, name(truth)), row.slice(0, size).map((times, taken) => {
          const cell = el("td", { title: `${name(truth)} taken for ${name(taken)}: ${count(times)} (${percent(times / all)})` }, times ? count(times) : "");
          if (times) cell.style.background = `color-mix(in srgb, ${truth === taken ? good : bad} ${Math.round(12 + (truth === taken ? 48 : 80) * Math.sqrt(times / all))}%, transparent)`;
          return cell;
        }));
      }))));
  }
  return { root, draw };
}

function counts(record) {
  const found = record?.confusion;
  return Array.isArray(found) && found.length > 1 && found.every((row) => Array.isArray(row)) ? found : null;
}
