// One run, live.

import { ago, confirm, count, duration, el, isNumber, moment, panel, percent, segments, short, tableOf, toast } from "./dom.js";
import { ask, pushed, runPath } from "./net.js";
import { Curves, rising, smooth, withGaps } from "./curves.js";
import { Plot, joined } from "./plot.js";
import { workersPanel } from "./workers.js";
import { timelinePanel } from "./timeline.js";
import { hostsPanel } from "./hosts.js";
import { confusionPanel } from "./confusion.js";
import { tryPanel } from "./try.js";
import { graphPanel } from "./graph.js";
import { layersPanel } from "./layers.js";

const AXES = { step: "Steps", samples: "Samples", time: "Time" };

export async function showRun(main, name) {
  const run = { name, curves: new Curves(), head: {}, row: null, evaluations: [], events: [], plan: null, summary: null };
  const parts = [];
  const frame = header(run);
  const findings = el("div", { class: "findings", "aria-live": "polite", "aria-label": "What is wrong" });
  const grid = el("div", { class: "grid" });
  main.append(frame.root, frame.tiles, findings, grid);
  const column = () => grid.appendChild(el("div", { class: "column" }));
  const add = (place, ...made) => { parts.push(...made); place.append(...made.map((part) => part.root)); };
  add(grid, lossPanel(run), accuracyPanel(run));
  const [left, right] = [column(), column()];
  add(left, timelinePanel(run), ratePanel(run), tryPanel(run), predictedPanel(run));
  add(right, workersPanel(run), stalenessPanel(run), confusionPanel(run));
  add(grid, hostsPanel(run), loggedPanel(run), layersPanel(run), graphPanel(run));
  const [below, beside] = [column(), column()];
  add(below, planPanel(run));
  add(beside, terminalPanel(run));

  let drawn = false;
  const draw = () => {
    drawn = false;
    frame.draw();
    drawFindings(findings, run);
    for (const part of parts) part.draw?.();
  };
  const draws = () => { if (!drawn) { drawn = true; requestAnimationFrame(draw); } };
  pushed.watch(name, (message) => {
    if (message.type === "gone") { toast(`the run ${name} is not there any more`); location.hash = "#/"; return; }
    if (message.type === "row") { Object.assign(run, { row: message.row, plan: message.plan, summary: message.summary }); draws(); return; }
    if (message.type !== "whole" && message.type !== "changes") return;
    run.curves.take(message.curves);
    for (const key of ["head", "workers", "hosts", "findings", "events", "evaluations", "classes", "layers", "staleness", "predicted", "plan", "summary"]) {
      if (key in message) run[key] = message[key];
    }
    draws();
  });
  const refresh = setInterval(draws, 1000);
  return () => { clearInterval(refresh); for (const part of parts) part.leave?.(); };
}

function header(run) {
  const state = el("span", { class: "pill" }, "…");
  const sub = el("p", { class: "sub" }, "");
  const act = (path, what) => async () => {
    try { await ask(runPath(run.name, path), { method: "POST", body: {} }); toast(what, true); } catch (error) { toast(error.message); }
  };
  const stop = el("button", { type: "button", id: "stop", onclick: act("/stop", "The run finishes its step, saves and stops.") }, "Stop");
  const resume = el("button", { type: "button", id: "resume", class: "primary", onclick: () => goOn(run) }, "Resume");
  const remove = el("button", { type: "button", class: "danger", onclick: () => removeRun(run) }, "Delete");
  const root = el("div", { class: "head" },
    el("div", { class: "grow" }, el("div", { class: "row" }, el("h1", {}, run.name), state), sub),
    el("div", { class: "row" }, stop, resume,
      el("a", { class: "button", href: `#/new/${encodeURIComponent(run.name)}` }, "Clone"),
      el("a", { class: "button", href: runPath(run.name, "/weights"), download: "" }, "Weights"),
      el("a", { class: "button", href: runPath(run.name, "/plan"), download: "" }, "Plan"), remove));
  const tile = (label) => {
    const value = el("dd", {}, "–");
    const under = el("div", { class: "under" }, "");
    return { value, under, root: el("div", { class: "tile" }, el("dl", {}, el("dt", {}, label), value), under) };
  };
  const tiles = { accuracy: tile("Held-out accuracy"), loss: tile("Training loss"), speed: tile("Samples per second"), progress: tile("Progress"), left: tile("Time left"), workers: tile("Workers") };
  const bar = el("i", { "width%": 0 });
  tiles.progress.root.append(el("div", { class: "progress" }, bar));
  const put = ({ value, under }, text, unit, below) => {
    value.replaceChildren(text, unit ? el("small", {}, unit) : "");
    under.textContent = below ?? "";
  };

  function draw() {
    const { head, row, summary } = run;
    const isLive = row?.state === "live";
    state.textContent = row?.state ?? "…";
    state.className = `pill ${row?.state ?? ""}`;
    stop.hidden = !(isLive && row?.is_own);
    resume.hidden = isLive || !run.plan || !row;
    remove.hidden = isLive;
    sub.textContent = [row?.model || head.model, row?.data || head.data, row?.strategy || head.strategy].filter(Boolean).join(" · ")
      + (head.last_t ? ` · ${isLive ? "began" : "ended"} ${ago(isLive ? head.first_t : head.last_t)}` : "")
      + (head.is_behind ? " · reading what it has recorded …" : "") + (head.damaged ? ` · ${count(head.damaged)} damaged lines left out` : "");
    const best = Math.max(...run.evaluations.map((one) => one.accuracy ?? -1));
    const newest = run.evaluations.at(-1);
    const accuracy = newest?.accuracy ?? summary?.accuracy;
    put(tiles.accuracy, isNumber(accuracy) ? (100 * accuracy).toFixed(2) : "–", isNumber(accuracy) ? "%" : "", best > 0 ? `best ${percent(best, 2)}` : "");
    const loss = run.curves.get("step:loss").mean.at(-1);
    put(tiles.loss, short(loss ?? summary?.loss), "", isNumber(newest?.loss) ? `held out ${short(newest.loss)}` : "");
    const speed = isLive ? head.samples_per_second : (summary?.samples_per_second ?? meanOf(run.curves.get("time:samples").mean));
    put(tiles.speed, count(speed), "", isNumber(speed) && head.workers > 1 ? `${count(speed / head.workers)} per worker` : "");
    const part = head.total_steps ? Math.min(head.step / head.total_steps, 1) : 0;
    put(tiles.progress, count(head.step), head.total_steps ? `of ${count(head.total_steps)} steps` : "steps", head.epochs ? `epoch ${Math.min((head.epoch ?? 0) + 1, head.epochs)} of ${head.epochs}` : "");
    bar.style.width = `${100 * part}%`;
    const took = isNumber(head.last_t) ? head.last_t - head.first_t : summary?.wall_s;
    put(tiles.left, isLive ? duration(head.left_s) : duration(took), "", isLive ? `${duration(took)} so far` : "in all");
    tiles.left.root.querySelector("dt").textContent = isLive ? "Time left" : "Time";
    put(tiles.workers, count(isLive ? head.workers : (summary?.workers ?? run.workers?.count)), "", gone(run));
  }
  return { root, tiles: el("div", { class: "tiles" }, Object.values(tiles).map((one) => one.root)), draw };
}

const meanOf = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function gone(run) {
  const deaths = run.events.filter((event) => event.kind === "death" || event.kind === "host").length;
  return deaths ? `${deaths} death${deaths > 1 ? "s" : ""} survived` : run.plan?.cluster?.threads ? `${run.plan.cluster.threads} thread${run.plan.cluster.threads > 1 ? "s" : ""} each` : "";
}

async function goOn(run) {
  const done = run.head.total_steps && run.head.step >= run.head.total_steps;
  const before = run.plan?.train?.epochs ?? run.head.epochs ?? 12;
  try {
    await ask(runPath(run.name, "/resume"), { method: "POST", body: done ? { epochs: 2 * before } : {} });
    toast(done ? `It goes on to ${2 * before} epochs.` : "It goes on from its newest checkpoint.", true);
  } catch (error) { toast(error.message); }
}

async function removeRun(run) {
  if (!(await confirm(`Delete ${run.name}?`, "Its records, its plan and its checkpoints are removed. This cannot be undone.", "Delete the run"))) return;
  try {
    await ask(runPath(run.name), { method: "DELETE", body: { confirm: run.name } });
    location.hash = "#/";
  } catch (error) { toast(error.message); }
}

function drawFindings(place, run) {
  const found = (run.findings ?? []).map((one) => el("div", { class: "finding" }, el("strong", {}, one.text),
    one.share > 0 ? el("span", { class: "cost" }, `${Math.round(100 * one.share)} % of the time`) : el("span"), el("span", { class: "advice" }, one.advice)));
  if (run.row?.error) found.unshift(el("div", { class: "finding error" }, el("strong", {}, run.row.error.replace(/^error: /, ""))));
  const key = found.map((one) => one.textContent).join();
  if (place.dataset.key !== key) { place.dataset.key = key; place.replaceChildren(...found); }
}

function lossPanel(run) {
  let axis = "step";
  const firstT = () => run.head.first_t ?? 0;
  const format = () => ({ step: count, samples: count, time: moment })[axis];
  const options = { label: "Loss by step", height: 270, xLabel: "step", xFormat: (x) => format()(x), onZoom: zoom, sync: "steps" };
  const plot = new Plot([{ name: "train", colour: "c1", band: true }, { name: "held out", colour: "c2", points: true }], options);
  const { root, header: head } = panel("Loss", "two-thirds", plot.root);
  head.append(el("span", { class: "spacer" }),
    segments("Scale", { linear: "Linear", log: "Log" }, "linear", (value) => { options.log = value === "log"; plot.build(); }),
    segments("Along", AXES, axis, (value) => { axis = value; options.xLabel = value; plot.isZoomed = false; draw(); plot.build(); }));

  function whole(curve) {
    const along = (xs) => run.curves.along(axis, xs, run.head.workers, firstT());
    const held = run.evaluations.filter((one) => isNumber(one.loss) && isNumber(one.step));
    return joined([[rising(along(curve.x)), curve.mean, curve.low, curve.high], [rising(along(held.map((one) => one.step))), held.map((one) => one.loss)]])
      .map((column, number, all) => (number === 4 ? all[4] : column));
  }
  function order(data) { return [data[0], data[1], data[2], data[3], data[4]]; }
  function draw() { plot.set(order(whole(run.curves.get("step:loss")))); }
  let asked = 0;
  async function zoom(first, last) {
    if (first === null) { draw(); return; }
    const turn = (asked += 1);
    const at = (place) => run.curves.stepAt(axis, place, run.head.workers, firstT());
    const most = Math.round(plot.box.clientWidth);
    const curve = await ask(runPath(run.name, `/curve?name=step:loss&first=${at(first)}&last=${at(last)}&most=${most}`)).catch(() => null);
    if (curve && turn === asked) plot.detail(order(whole(curve)));
  }
  return { root, draw, leave: () => plot.destroy() };
}

function accuracyPanel(run) {
  const line = (name, colour) => ({ name, colour, points: true, format: (value) => percent(value, 2) });
  const plot = new Plot([line("top-1", "c1"), line("top-5", "c3")],
    { label: "Held-out accuracy by step", height: 270, xFormat: count, yFormat: (value) => `${Math.round(1000 * value) / 10} %` });
  const { root } = panel("Held-out accuracy", "third", plot.root);
  const draw = () => {
    const known = run.evaluations.filter((one) => isNumber(one.accuracy));
    root.hidden = !known.length && run.evaluations.length > 0;
    plot.set([rising(known.map((one) => one.step)), known.map((one) => one.accuracy), known.map((one) => one.top5 ?? null)]);
  };
  return { root, draw, leave: () => plot.destroy() };
}

function ratePanel(run) {
  const plot = new Plot([{ name: "samples/s", colour: "c3", format: count }, { name: "each moment", colour: "c3", isFaint: true, format: count }],
    { label: "Samples per second by time", from0: true, height: 200, xLabel: "time", xFormat: moment, yFormat: count, keepsGaps: true });
  const { root } = panel("Throughput", "", plot.root);
  const draw = () => {
    const { x, mean, width } = run.curves.get("time:samples");
    const length = Math.max(0, x.length - (run.row?.state === "live" ? 1 : 0)); // the last piece of time is not over
    const places = x.slice(0, length).map((t) => t - (run.head.first_t ?? x[0]));
    const [at, values] = withGaps(places, mean.slice(0, length), Math.max(20 * width, 4));
    plot.set([at, smooth(values), values]);
  };
  return { root, draw, leave: () => plot.destroy() };
}

function stalenessPanel(run) {
  const bars = el("div", { class: "workers" });
  const { root } = panel("Staleness: updates by others before a gradient arrived", "", bars);
  return { root, draw: () => {
    const counts = run.staleness ?? [];
    root.hidden = !counts.length;
    const total = counts.reduce((sum, [, times]) => sum + times, 0);
    bars.replaceChildren(...counts.slice(0, 16).flatMap(([value, times]) => [
      el("span", { class: "label" }, String(value)), el("div", { class: "stack mark-accent" }, el("i", { class: "mark-accent", "width%": (100 * times) / total })),
      el("span", { class: "value" }, percent(times / total)), el("span", { class: "value" }, count(times))]));
  } };
}

function loggedPanel(run) {
  const plots = new Map();
  const place = el("div", { class: "grid" });
  const { root } = panel("Logged by the script", "", place);
  return { root, draw: () => {
    const names = run.curves.names("step:log ");
    root.hidden = !names.length;
    for (const key of names) {
      const name = key.slice("step:log ".length);
      if (!plots.has(key)) {
        const plot = new Plot([{ name, colour: "c4", band: true }], { label: `${name} by step`, height: 170, xFormat: count });
        plots.set(key, plot);
        place.append(el("div", { class: "third" }, el("h3", {}, name), plot.root));
      }
      const { x, mean, low, high } = run.curves.get(key);
      plots.get(key).set([x, mean, low, high]);
    }
  }, leave: () => { for (const plot of plots.values()) plot.destroy(); } };
}

function predictedPanel(run) {
  const place = el("div");
  const { root } = panel("Predicted beside measured", "", place);
  return { root, draw: () => {
    const predicted = run.predicted;
    root.hidden = !predicted;
    if (!predicted) return;
    const measured = { samples_per_second: run.summary?.samples_per_second ?? run.head.samples_per_second, ...(run.summary ?? {}) };
    const rows = Object.entries(predicted).filter(([, value]) => isNumber(value)).map(([key, value]) =>
      [key.replaceAll("_", " "), value, measured[key], isNumber(measured[key]) && value ? percent(measured[key] / value - 1) : "–"]);
    place.replaceChildren(tableOf({ head: ["", "predicted", "measured", "off by"], body: rows }));
  } };
}

function planPanel(run) {
  const facts = el("dl", { class: "facts" });
  const { root } = panel("Plan", "", facts);
  return { root, draw: () => {
    root.hidden = !run.plan;
    const key = JSON.stringify(run.plan);
    if (!run.plan || facts.dataset.key === key) return;
    facts.dataset.key = key;
    facts.replaceChildren();
    const { cluster = {}, train = {}, ...rest } = run.plan;
    for (const [key, value] of Object.entries({ ...rest, ...cluster, ...train })) {
      if (value !== null && value !== false) facts.append(el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, String(value)));
    }
  } };
}

function terminalPanel(run) {
  const text = el("pre", { class: "terminal", tabindex: "0", "aria-label": "What the command line has shown" });
  const { root } = panel("What the command line has shown", "", text);
  let next = 0;
  return { root, draw: () => {
    if (Date.now() < next) return;
    next = Date.now() + (run.row?.state === "live" ? 2000 : 15000);
    ask(runPath(run.name, "/terminal"), { raw: true }).then((answer) => answer.text()).then((shown) => {
      root.hidden = !shown;
      if (text.textContent === shown) return;
      text.textContent = shown;
      text.scrollTop = text.scrollHeight;
    }).catch(() => {});
  } };
}
