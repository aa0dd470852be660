// All runs: live ones first; filter, sort, choose some to compare.

import { ago, count, el, percent, short } from "./dom.js";
import { pushed } from "./net.js";

const COLUMNS = [
  ["name", "Run", (row) => row.name],
  ["state", "State", (row) => row.state],
  ["model", "Model", (row) => row.model],
  ["data", "Data", (row) => row.data],
  ["strategy", "Strategy", (row) => row.strategy],
  ["workers", "Workers", (row) => row.workers],
  ["accuracy", "Accuracy", (row) => row.accuracy],
  ["loss", "Loss", (row) => row.loss],
  ["samples_per_second", "Samples/s", (row) => row.samples_per_second],
  ["steps", "Steps", (row) => row.steps],
  ["changed_t", "Changed", (row) => row.changed_t],
];
const NUMBERS = new Set(["workers", "accuracy", "loss", "samples_per_second", "steps", "changed_t"]);
const STATES = ["live", "finished", "stopped", "failed"];
const view = { filter: "", state: "", sort: null, isDown: false, chosen: new Set() };

export function showRuns(main) {
  let rows = null;
  const filter = el("input", { type: "search", placeholder: "Filter by name, model, data or strategy", "aria-label": "Filter runs", value: view.filter });
  const state = el("select", { "aria-label": "State" }, el("option", { value: "" }, "Any state"), STATES.map((name) => el("option", { value: name, selected: name === view.state }, name)));
  const body = el("tbody");
  const heads = COLUMNS.map(([key, text]) => el("th", { scope: "col", class: NUMBERS.has(key) ? "number" : null },
    el("button", { type: "button", onclick: () => sort(key) }, text)));
  const table = el("table", { class: "table hover runs" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "quiet" }, "")), heads)), body);
  const place = el("section", { class: "panel flush", "aria-label": "Runs" }, table);
  const comparing = el("div", { class: "comparing", hidden: true });
  const summary = el("p", { class: "sub" }, "looking …");
  main.append(
    el("div", { class: "head" }, el("div", { class: "grow" }, el("h1", {}, "Runs"), summary), el("a", { class: "button primary", href: "#/new" }, "New run")),
    el("div", { class: "row", id: "filters" }, filter, state), place, comparing);

  function sort(key) {
    view.isDown = view.sort === key ? !view.isDown : NUMBERS.has(key);
    view.sort = key;
    draw();
  }

  function cell(row, key, text, label) {
    return el("td", { class: NUMBERS.has(key) ? `number${text === "–" ? " blank" : ""}` : "what", "data-label": label }, text);
  }

  function line(row) {
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${row.name}` });
    box.checked = view.chosen.has(row.name);
    box.addEventListener("click", (event) => event.stopPropagation());
    box.addEventListener("change", () => { if (box.checked) view.chosen.add(row.name); else view.chosen.delete(row.name); offer(); });
    const address = `#/run/${encodeURIComponent(row.name)}`;
    return el("tr", { onclick: (event) => { if (event.target.tagName !== "A") location.hash = address; } },
      el("td", {}, box),
      el("td", { class: "name" }, el("a", { href: address }, row.name)),
      el("td", { class: "state" }, el("span", { class: `pill ${row.state}`, title: row.error || null }, row.state)),
      cell(row, "model", row.model || "–"), cell(row, "data", row.data || "–"), cell(row, "strategy", row.strategy || "–"),
      cell(row, "workers", count(row.workers), "workers"), cell(row, "accuracy", percent(row.accuracy), "accuracy"),
      cell(row, "loss", short(row.loss), "loss"), cell(row, "samples_per_second", count(row.samples_per_second), "samples/s"),
      cell(row, "steps", count(row.steps), "steps"), cell(row, "changed_t", row.changed_t ? ago(row.changed_t) : "–"));
  }

  function offer() {
    const names = [...view.chosen];
    comparing.hidden = names.length < 2;
    comparing.replaceChildren(el("span", {}, `${names.length} runs`),
      el("a", { class: "button primary small", href: `#/compare/${names.map(encodeURIComponent).join(",")}` }, "Compare"),
      el("button", { type: "button", class: "small", onclick: () => { view.chosen.clear(); draw(); } }, "Clear"));
  }

  function draw() {
    if (!rows) return;
    const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = rows.filter((row) => (!view.state || row.state === view.state)
      && words.every((word) => `${row.name} ${row.model} ${row.data} ${row.strategy}`.toLowerCase().includes(word)));
    if (view.sort) {
      const get = COLUMNS.find(([key]) => key === view.sort)[2];
      const way = view.isDown ? -1 : 1;
      shown = [...shown].sort((one, other) => {
        const [a, b] = [get(one), get(other)];
        if (a === b) return 0;
        if (a === null || a === undefined || a === "") return 1;
        if (b === null || b === undefined || b === "") return -1;
        return a < b ? -way : way;
      });
    }
    COLUMNS.forEach(([key], number) => {
      if (key === view.sort) heads[number].setAttribute("aria-sort", view.isDown ? "descending" : "ascending");
      else heads[number].removeAttribute("aria-sort");
    });
    const live = rows.filter((row) => row.state === "live").length;
    summary.textContent = rows.length ? `${rows.length} run${rows.length > 1 ? "s" : ""}, ${live} live` : "";
    view.chosen = new Set([...view.chosen].filter((name) => rows.some((row) => row.name === name)));
    if (!rows.length) {
      place.replaceChildren(el("div", { class: "empty" }, el("h2", {}, "No runs yet"),
        el("p", {}, "Train a small network on real digits: it takes half a minute."), el("a", { class: "button primary", href: "#/new" }, "New run")));
    } else {
      if (!place.contains(table)) place.replaceChildren(table);
      const focused = document.activeElement?.getAttribute?.("aria-label");
      body.replaceChildren(...shown.map(line));
      if (focused?.startsWith("Compare ")) [...body.querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focused)?.focus();
      if (!shown.length) body.append(el("tr", {}, el("td", { colspan: COLUMNS.length + 1, class: "empty" }, "No run is like that.")));
    }
    offer();
  }

  filter.addEventListener("input", () => { view.filter = filter.value; draw(); });
  state.addEventListener("change", () => { view.state = state.value; draw(); });
  pushed.watch(null, (message) => { if (message.type === "runs") { rows = message.rows; draw(); } });
}
