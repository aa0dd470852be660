// A new run: data, model, strategy, workers, length; what it will do; and start.

import { count, el, paint, panel, short, toast } from "./dom.js";
import { ask, runPath } from "./net.js";
import { Plot } from "./plot.js";

const SLOWLY_MS = 300;

export async function showNew(main, from) {
  main.append(el("p", { class: "empty" }, "asking which models and data there are …"));
  const [known, plan] = await Promise.all([ask("/choices"), from ? ask(runPath(from)).then((run) => run.plan) : null]);
  const form = new Form(known, plan ?? known.plan, from);
  main.replaceChildren(
    el("div", { class: "head" }, el("div", { class: "grow" }, el("h1", {}, from ? `Like ${from}, with changes` : "New run"),
      el("p", { class: "sub" }, "Every choice has a default that works. What you choose is what the command line would do.")), null), form.root);
  form.changed();
  return () => form.leave();
}

class Form {
  constructor(known, plan, from) {
    this.known = known;
    this.samples = null;
    this.train = { ...plan.train };
    this.cluster = { ...plan.cluster };
    if (!from) this.train.epochs = 12;
    this.data = new Named("data", known.data.map((one) => ({ ...one, about: one.line, settings: [] })), plan.data, () => this.dataChanged(), known.allow_code);
    this.model = new Named("model", known.models, plan.model, () => this.changed(), known.allow_code);
    this.strategy = new Named("strategy", [...known.strategies, ...known.presets.map((one) => ({ ...one, about: `${one.line}\n${one.about}`, settings: [] }))], plan.strategy, () => this.changed());
    this.placement = new Named("placement", known.placements, plan.placement, () => this.changed());
    this.preview = el("div", {});
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.command = el("div", { class: "command", "aria-label": "The same as a command" });
    this.why = el("p", { class: "about" });
    this.rate = new Plot([{ name: "learning rate", colour: "c1", format: short }], { label: "Learning rate by step", height: 150, from0: true, xFormat: count });
    this.start = el("button", { type: "button", class: "primary", id: "start", onclick: () => this.go() }, "Start the run");
    this.fetch = el("input", { type: "checkbox", id: "fetch" });
    this.name = el("input", { placeholder: "chosen by itself", "aria-label": "Name", maxlength: "100" });
    this.root = this.built();
    this.dataChanged();
  }

  leave() { this.rate.destroy(); clearTimeout(this.later); clearTimeout(this.dataLater); }

  field(label, holder, key, attributes, hint) {
    const input = el("input", { type: "number", value: holder[key] ?? "", ...attributes, oninput: () => {
      holder[key] = input.value === "" ? null : attributes.type === "text" ? input.value : Number(input.value);
      this.changed();
    } });
    return el("label", { class: "field" }, label, input, hint ? el("small", {}, hint) : null);
  }

  choice(label, holder, key, values) {
    const select = el("select", { onchange: () => { holder[key] = select.value; this.changed(); } }, values.map((value) => el("option", { value, selected: value === holder[key] }, value)));
    return el("label", { class: "field" }, label, select);
  }

  built() {
    const step = (number, title, ...children) => {
      const { root } = panel(title, "", ...children);
      root.querySelector("h2").prepend(el("b", {}, String(number)));
      return root;
    };
    const number = (least) => ({ min: String(least), step: "1", inputmode: "numeric" });
    this.cluster.workers ??= 2;
    return el("form", { class: "form", onsubmit: (event) => { event.preventDefault(); this.go(); } },
      el("div", { class: "grid" },
        step(1, "Data", this.data.root, this.preview, el("label", { class: "row" }, this.fetch, "download published data that is not here yet")),
        step(2, "Model", this.model.root),
        step(3, "How the workers agree", this.strategy.root),
        step(4, "Workers and length", el("div", { class: "fields" },
          this.field("Workers", this.cluster, "workers", { ...number(1), id: "workers" }), this.field("Servers", this.cluster, "servers", number(0), "own parameters, for strategies that have them"),
          this.field("Threads per worker", this.cluster, "threads", { ...number(1), placeholder: "cores ÷ workers" }),
          this.field("Epochs", this.train, "epochs", { ...number(1), id: "epochs" }), this.field("Steps at most", this.train, "steps", { ...number(1), placeholder: "no limit" }),
          this.field("Batch per worker", this.train, "batch", { ...number(1), placeholder: "what suits the strategy" }), this.field("Seed", this.train, "seed", number(0)))),
        step(5, "Learning", el("div", { class: "fields" },
          this.field("Optimizer", this.train, "optimizer", { type: "text", placeholder: "by the rule, see the right" }, this.known.optimizers.join(", ")),
          this.field("Warm-up", this.train, "warm_up", { min: "0", step: "0.1", placeholder: "by the rule" }, "epochs"), this.choice("Schedule", this.train, "schedule", this.known.schedules),
          this.field("Clip norm", this.train, "clip_norm", { min: "0", step: "any", placeholder: "none" }), this.field("Watch layers", this.train, "watch_layers", { min: "1", step: "1", placeholder: "no" }, "record norms and histograms after so many steps"), this.field("Save every", this.train, "save_every", { type: "text" }, "epoch, 500steps, 10min or never"))),
        step(6, "Placement of a replica", this.placement.root)),
      el("aside", {},
        panel("Start", "", el("label", { class: "field" }, "Name", this.name), el("p", { class: "about" }), this.problem, this.start).root,
        panel("Learning rate", "", this.why, this.rate.root).root,
        panel("The same as a command", "", this.command).root));
  }

  plan() {
    return { model: this.model.text(), data: this.data.text(), strategy: this.strategy.text(), placement: this.placement.text(), cluster: this.cluster, train: this.train };
  }

  dataChanged() {
    clearTimeout(this.dataLater);
    this.samples = null;
    this.dataLater = setTimeout(() => this.look(), SLOWLY_MS);
    this.changed();
  }

  async look() {
    const name = this.data.text();
    try {
      const found = await ask(`/data?name=${encodeURIComponent(name)}`);
      if (name !== this.data.text()) return;
      this.samples = found.train;
      const counts = found.counts ?? [];
      const most = Math.max(...counts, 1);
      this.preview.replaceChildren(
        el("p", { class: "about" }, `${count(found.train)} samples to train on, ${count(found.test)} held out, each ${found.shape.join("×")}, ${count(found.classes)} ${found.task === "classify" ? "classes" : "tokens"}${found.note ? `. ${found.note}` : ""}`),
        found.pictures ? el("div", { class: "pictures" }, found.pictures.slice(0, 12).map((one) => el("figure", {}, paint(el("canvas", { role: "img", "aria-label": `class ${one.label}` }), one.pixels), el("figcaption", {}, String(one.label))))) : "",
        counts.length > 1 && counts.length <= 100 ? el("div", { class: "counts", role: "img", "aria-label": `Samples per class: ${counts.join(", ")}` }, counts.map((times, at) => el("i", { "height%": (100 * times) / most, title: `class ${at}: ${count(times)}` }))) : "");
    } catch (error) {
      if (name === this.data.text()) this.preview.replaceChildren(el("p", { class: "about" }, error.message));
    }
    this.changed();
  }

  changed() {
    this.command.textContent = this.words();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.check(), SLOWLY_MS);
  }

  async check() {
    try {
      const found = await ask("/preview", { method: "POST", body: { plan: this.plan(), samples: this.samples } });
      this.problem.hidden = true;
      this.start.disabled = false;
      this.why.textContent = `${found.optimizer}: ${found.why || "as you have said"}${found.total_steps ? `. ${count(found.total_steps)} steps, ${count(found.steps_per_epoch)} an epoch` : ""}`;
      this.rate.root.hidden = !found.step;
      if (found.step) this.rate.set([found.step, found.rate]);
    } catch (error) {
      this.problem.hidden = false;
      this.problem.textContent = error.message;
      this.start.disabled = true;
    }
  }

  async go() {
    this.start.disabled = true;
    try {
      const { name } = await ask("/runs", { method: "POST", body: { plan: this.plan(), name: this.name.value.trim(), fetch: this.fetch.checked } });
      location.hash = `#/run/${encodeURIComponent(name)}`;
    } catch (error) {
      toast(error.message);
      this.start.disabled = false;
    }
  }

  words() {
    const { model, data, strategy, placement, cluster, train } = this.plan();
    const words = ["manyhands train", `--model ${model}`, `--data ${data}`, `--strategy ${strategy}`];
    if (placement !== this.known.plan.placement) words.push(`--placement ${placement}`);
    for (const [flag, value] of [["workers", cluster.workers], ["servers", cluster.servers || null], ["threads", cluster.threads], ["epochs", train.epochs], ["steps", train.steps], ["batch", train.batch], ["optimizer", train.optimizer], ["seed", train.seed || null], ["save-every", train.save_every === "epoch" ? null : train.save_every]]) {
      if (value !== null && value !== undefined && value !== "") words.push(`--${flag} ${value}`);
    }
    if (this.fetch?.checked) words.push("--fetch");
    return words.join(" ");
  }
}

// Something chosen by name, with its settings, as the command line writes it: `name:key=value`.
class Named {
  constructor(kind, entries, text, changed, ownAllowed = false) {
    this.entries = entries;
    this.changed = changed;
    const [name, given] = parsed(text, entries);
    this.values = given;
    const own = "your own …";
    this.own = el("input", { value: name === null ? text : "", placeholder: kind === "data" ? "images:FOLDER, npz:FILE, text:FILE …" : "package.module:callable", "aria-label": `Your own ${kind}`, oninput: () => this.changed() });
    this.select = el("select", { id: kind, "aria-label": kind, onchange: () => { this.values = {}; this.draw(); this.changed(); } },
      entries.map((one) => el("option", { value: one.name, selected: one.name === name }, one.form ?? one.name)),
      ownAllowed || kind === "data" || name === null ? el("option", { value: "", selected: name === null }, own) : null);
    this.about = el("p", { class: "about" });
    this.fields = el("div", { class: "fields" });
    this.root = el("div", {}, this.select, this.own, this.about, this.fields);
    this.draw();
  }

  get entry() { return this.entries.find((one) => one.name === this.select.value); }

  draw() {
    const entry = this.entry;
    const needsPath = entry?.form?.includes(":") ?? false;
    this.own.hidden = Boolean(entry) && !needsPath;
    if (needsPath && !this.own.value.startsWith(`${entry.name}:`)) this.own.value = entry.form;
    this.about.textContent = entry?.about ?? "";
    this.fields.replaceChildren(...(entry?.settings ?? []).map((setting) => {
      const input = el("input", { value: this.values[setting.name] ?? "", placeholder: setting.default || "none", oninput: () => { this.values[setting.name] = input.value.trim(); this.changed(); } });
      return el("label", { class: "field" }, setting.name.replaceAll("_", " "), input);
    }));
  }

  text() {
    const entry = this.entry;
    if (!entry || !this.own.hidden) return this.own.value.trim();
    const settings = Object.entries(this.values).filter(([, value]) => value !== "").map(([key, value]) => `${key}=${value}`);
    return settings.length ? `${entry.name}:${settings.join(",")}` : entry.name;
  }
}

function parsed(text, entries) {
  const [name, ...rest] = text.split(":");
  const entry = entries.find((one) => one.name === name);
  const settings = rest.join(":").split(",").filter(Boolean).map((piece) => piece.split("="));
  if (!entry || settings.some((pair) => pair.length !== 2) || entry.form?.includes(":")) return [entry && !rest.length ? name : null, {}];
  return [name, Object.fromEntries(settings)];
}
