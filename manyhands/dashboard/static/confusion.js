// Which classes are taken for which: a row for each true class.

import { behind, colour, count, el, paint, panel, percent } from "./dom.js";
import { ask, runPath } from "./net.js";

const MOST_CLASSES = 40;

export function confusionPanel(run) {
  const place = el("div", { class: "confusion", tabindex: "0" });
  const told = el("p", { class: "quiet" });
  const table = behind(() => ({
    head: ["class", "samples", "precision", "recall", "F1"],
    body: (run.classes?.per_class ?? []).map((one) => [one.name, count(one.samples), percent(one.precision), percent(one.recall), percent(one.f1)]),
  }));
  const cell = el("div", { "aria-live": "polite" });
  const { root, header } = panel("Confusion matrix", "", place, cell, table);

  async function open(truth, taken, names) {
    cell.replaceChildren(el("p", { class: "quiet" }, "asking the newest checkpoint …"));
    try {
      const found = await ask(runPath(run.name, `/taken?truth=${truth}&taken=${taken}`));
      const said = found.pictures.length ? `held-out pictures of ${names[0]} that are taken for ${names[1]}` : `no held-out picture of ${names[0]} is taken for ${names[1]} at step ${found.step}`;
      cell.replaceChildren(el("p", { class: "about" }, said), el("div", { class: "pictures" }, found.pictures.map((one) =>
        el("figure", {}, paint(el("canvas", { role: "img", "aria-label": `held-out sample ${one.label}` }), one.pixels), el("figcaption", {}, `no. ${one.label}`)))));
    } catch (error) {
      cell.replaceChildren(el("p", { class: "quiet" }, error.message));
    }
  }

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
          const act = () => open(truth, taken, [name(truth), name(taken)]);
          const cell = el("td", { ...(times ? { tabindex: "0", role: "button", onclick: act, onkeydown: (event) => { if (event.key === "Enter") act(); } } : {}), title: `${name(truth)} taken for ${name(taken)}: ${count(times)} (${percent(times / all)})` }, times ? count(times) : "");
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
