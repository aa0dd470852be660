// What happened when: generations, deaths, joins, checkpoints, evaluations and warnings on one line each.

import { clock, el, isNumber, panel, percent, short, svg } from "./dom.js";

const LANES = [
  ["Members", ["death", "host", "leave", "join", "again", "stuck", "server", "coordinator", "mixed", "leaving"]],
  ["Evaluations", ["evaluate"]],
  ["Checkpoints", ["checkpoint"]],
  ["Warnings", ["warning", "not a number", "dropped"]],
];
const BEGINS = new Set(["death", "host", "leave", "join", "again"]);
const BAD = new Set(["death", "host", "stuck", "again", "not a number", "coordinator", "server"]);
const GOOD = new Set(["join"]);
const LEFT = 92;
const LANE = 26;
const MOST_MARKS = 400;
const MOST_TOLD = 60; // and all that happened to members

export function timelinePanel(run) {
  const place = el("div", { class: "timeline" });
  const list = el("ol", { class: "events", tabindex: "0", "aria-label": "Events, the newest first" });
  const { root } = panel("What happened", "", place, list);
  let drawn = "";

  function draw() {
    const happened = [...run.events.filter((event) => event.kind !== "saved" && event.kind !== "end"), ...run.evaluations.map((one) => ({ ...one, kind: "evaluate" }))].sort((a, b) => a.t - b.t);
    const { first_t: first, last_t: last } = run.head;
    const width = place.clientWidth;
    root.hidden = !isNumber(first);
    const key = `${happened.length} ${Math.round(last)} ${width} ${happened.at(-1)?.t}`;
    if (!isNumber(first) || !width || key === drawn) return;
    drawn = key;
    const at = (t) => LEFT + ((width - LEFT - 8) * (t - first)) / Math.max(last - first, 1e-3);
    const height = LANE * (LANES.length + 1) + 20;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${happened.length} events; they are listed below` });
    generations(picture, happened, at, first, last);
    LANES.forEach(([name, kinds], number) => {
      const y = LANE * (number + 1) + LANE / 2;
      const label = svg("text", { x: 0, y: y + 4 });
      label.textContent = name;
      picture.append(label, svg("line", { class: "lane", x1: LEFT, x2: width - 8, y1: y, y2: y }));
      for (const event of happened.filter((one) => kinds.includes(one.kind)).slice(-MOST_MARKS)) picture.append(mark(event, at(event.t), y));
    });
    for (const [part, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const text = svg("text", { x: LEFT + (width - LEFT - 8) * part, y: height - 4, "text-anchor": anchor });
      text.textContent = clock(first + (last - first) * part);
      picture.append(text);
    }
    place.replaceChildren(picture);
    const members = new Set(LANES[0][1]);
    const told = happened.filter((event, number) => members.has(event.kind) || number >= happened.length - MOST_TOLD);
    list.replaceChildren(...told.slice(-2 * MOST_TOLD).reverse().map((event) => el("li", {}, el("time", {}, clock(event.t)),
      el("span", { class: `kind ${tone(event.kind)}` }, event.kind === "evaluate" ? "evaluation" : event.kind), el("span", {}, said(event)))));
  }
  return { root, draw };
}

function generations(picture, happened, at, first, last) {
  const begins = [first];
  for (const event of happened) if (BEGINS.has(event.kind) && event.t - begins.at(-1) > 0.05) begins.push(event.t);
  const label = svg("text", { x: 0, y: LANE / 2 + 4 });
  label.textContent = "Generations";
  picture.append(label);
  begins.forEach((t, number) => {
    const [x, end] = [at(t), at(begins[number + 1] ?? last)];
    picture.append(svg("rect", { class: `generation ${number % 2 ? "odd" : ""}`, x, y: 4, width: Math.max(end - x - 1, 1), height: LANE - 8, rx: 5 }));
    if (end - x > 18) {
      const text = svg("text", { x: (x + end) / 2, y: LANE / 2 + 4, "text-anchor": "middle" });
      text.textContent = String(number + 1);
      picture.append(text);
    }
  });
}

const tone = (kind) => (BAD.has(kind) ? "bad" : GOOD.has(kind) ? "good" : kind === "warning" || kind === "stuck" ? "warn" : "");

function mark(event, x, y) {
  const colour = { bad: "var(--bad)", good: "var(--good)", warn: "var(--warn)" }[tone(event.kind)] ?? "var(--accent)";
  const shapes = {
    bad: () => svg("path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, stroke: colour, "stroke-width": 2.4, "stroke-linecap": "round" }),
    good: () => svg("path", { d: `M${x} ${y - 6}v12m-6 -6h12`, stroke: colour, "stroke-width": 2.4, "stroke-linecap": "round" }),
  };
  const found = (shapes[tone(event.kind)] ?? (() => (event.kind === "checkpoint"
    ? svg("rect", { x: x - 4, y: y - 4, width: 8, height: 8, rx: 2, fill: colour })
    : svg("circle", { cx: x, cy: y, r: 4.2, fill: colour }))))();
  const title = svg("title");
  title.textContent = `${clock(event.t)} ${event.kind}: ${said(event)}`;
  found.append(title);
  return found;
}

function said(event) {
  const at = isNumber(event.step) ? ` at step ${event.step.toLocaleString("en")}` : "";
  switch (event.kind) {
    case "evaluate": return `${isNumber(event.accuracy) ? `accuracy ${percent(event.accuracy, 2)}, ` : ""}loss ${short(event.loss)}${at}`;
    case "checkpoint": return `saved${at}${isNumber(event.stopped_s) ? `; training stood still for ${Math.round(1000 * event.stopped_s)} ms` : ""}`;
    case "death": return `worker ${event.rank} died${event.how ? ` (${event.how})` : ""}${stood(event)}`;
    case "join": return `worker ${event.rank} joined${at}`;
    case "leave": return `worker ${event.rank} left${at}`;
    case "host": return `host ${event.host ?? ""} is gone${stood(event)}`;
    case "again": return `the run began again from ${event.checkpoint ?? "its beginning"}`;
    case "leaving": return "the run was told to stop: its workers finish their step, save and leave";
    case "warning": return event.text ?? "";
    case "not a number": return `the loss of worker ${event.rank} was no number${at}`;
    case "dropped": return event.reason ?? "";
    default: return Object.entries(event).filter(([key]) => !["kind", "t", "pid"].includes(key)).map(([key, value]) => `${key} ${value}`).join(", ");
  }
}

function stood(event) {
  const noticed = isNumber(event.noticed_s) ? `; noticed after ${event.noticed_s.toFixed(2)} s` : "";
  return isNumber(event.stood_s) ? `${noticed}, training stood still for ${event.stood_s.toFixed(2)} s` : noticed;
}
