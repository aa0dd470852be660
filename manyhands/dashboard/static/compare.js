// Several runs side by side: curves on one plot, and the settings that differ.

import { count, duration, el, isNumber, moment, panel, percent, segments, short, tableOf } from "./dom.js";
import { ask, runPath } from "./net.js";
import { Curves, rising } from "./curves.js";
import { Plot, joined } from "./plot.js";

const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const AGAIN_MS = 2000;

export async function showCompare(main, names) {
  let axis = "step";
  let log = false;
  const runs = names.slice(0, COLOURS.length).map((name, at) => ({ name, colour: COLOURS[at], curves: new Curves(), head: {}, evaluations: [] }));
  const problem = el("p", { class: "problem", hidden: true });
  const options = (label, more) => ({ label, height: 300, xFormat: (x) => ({ step: count, samples: count, time: moment })[axis](x), ...more });
  const loss = new Plot(runs.map((run) => ({ name: run.name, colour: run.colour })), options("Training loss"));
  const accuracy = new Plot(runs.map((run) => ({ name: run.name, colour: run.colour, points: true, format: (value) => percent(value, 2) })), options("Held-out accuracy", { yFormat: (value) => percent(value, 0) }));
  const lossPanel = panel("Training loss", "half", loss.root);
  const accuracyPanel = panel("Held-out accuracy", "half", accuracy.root);
  lossPanel.header.append(el("span", { class: "spacer" }), segments("Scale", { linear: "Linear", log: "Log" }, "linear", (value) => { loss.options.log = log = value === "log"; loss.build(); }));
  const results = panel("Results", "half");
  const settings = panel("Settings that differ", "half");
  const places = [el("div", { class: "scroll" }), el("div", { class: "scroll" })];
  results.root.append(places[0]);
  settings.root.append(places[1]);
  main.append(
    el("div", { class: "head" }, el("div", { class: "grow" }, el("h1", {}, `${runs.length} runs side by side`), el("p", { class: "sub" }, "The same axis for all: choose what it counts.")),
      segments("Along", { step: "Steps", samples: "Samples", time: "Time" }, axis, (value) => { axis = value; for (const plot of [loss, accuracy]) { plot.isZoomed = false; plot.options.xLabel = value; } draw(); for (const plot of [loss, accuracy]) plot.build(); })),
    problem, el("div", { class: "grid side-by-side" }, lossPanel.root, accuracyPanel.root, results.root, settings.root));

  function along(run, xs) { return rising(run.curves.along(axis, xs, run.head.workers, run.head.first_t)); }

  function draw() {
    loss.set(joined(runs.map((run) => { const { x, mean } = run.curves.get("step:loss"); return [along(run, x), mean]; })));
    accuracy.set(joined(runs.map((run) => { const known = run.evaluations.filter((one) => isNumber(one.accuracy)); return [along(run, known.map((one) => one.step)), known.map((one) => one.accuracy)]; })));
    places[0].replaceChildren(tableOf(resultsOf(runs)));
    const differing = settingsOf(runs);
    places[1].replaceChildren(differing.body.length ? tableOf(differing) : el("p", { class: "quiet" }, "None: these are the same plan."));
  }

  async function load() {
    for (const run of runs) {
      try {
        const found = await ask(runPath(run.name));
        run.curves.take(found.curves);
        Object.assign(run, { head: found.head, evaluations: found.evaluations ?? [], plan: found.plan, summary: found.summary });
      } catch (error) {
        problem.hidden = false;
        problem.textContent = `${run.name}: ${error.message}`;
      }
    }
    draw();
  }
  await load();
  const again = setInterval(() => { if (runs.some((run) => !run.summary)) load(); }, AGAIN_MS);
  return () => { clearInterval(again); loss.destroy(); accuracy.destroy(); };
}

function resultsOf(runs) {
  const rows = [
    ["accuracy", (run) => percent(run.evaluations.at(-1)?.accuracy ?? run.summary?.accuracy, 2)],
    ["held-out loss", (run) => short(run.evaluations.at(-1)?.loss ?? run.summary?.loss)],
    ["samples/s", (run) => count(run.summary?.samples_per_second ?? run.head.samples_per_second)],
    ["steps", (run) => count(run.head.step ?? run.summary?.steps)],
    ["time", (run) => duration((run.head.last_t ?? NaN) - (run.head.first_t ?? NaN))],
    ["workers", (run) => count(run.summary?.workers ?? run.head.workers)],
  ];
  return { head: ["", ...runs.map((run) => run.name)], body: rows.map(([name, get]) => [name, ...runs.map(get)]) };
}

function settingsOf(runs) {
  const flat = runs.map((run) => { const { cluster = {}, train = {}, ...rest } = run.plan ?? {}; return { ...rest, ...cluster, ...train }; });
  const keys = [...new Set(flat.flatMap((plan) => Object.keys(plan)))];
  const differing = keys.filter((key) => new Set(flat.map((plan) => JSON.stringify(plan[key] ?? null))).size > 1);
  return { head: ["", ...runs.map((run) => run.name)], body: differing.map((key) => [key.replaceAll("_", " "), ...flat.map((plan) => String(plan[key] ?? "–"))]) };
}
