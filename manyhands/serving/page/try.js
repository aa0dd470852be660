"use strict";
// Everything that is shown comes through textContent: names of models and classes are data, never markup.
const one = (id) => document.getElementById(id);
let token = "";

function asked(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  return fetch(path, { ...options, headers: { ...headers, ...(options.headers || {}) } });
}

function cell(row, text, kind = "") {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
}

const percent = (share) => (share === null ? "" : `${(100 * share).toFixed(1)} %`);
const milliseconds = (seconds) => (seconds === null ? "" : `≤ ${1000 * seconds} ms`);
const COLUMNS = ["version", "step", "state", "accuracy", "labels", "traffic", "requests", "p50", "p99"];

function showModel(model) {
  const part = document.createElement("div");
  const title = document.createElement("h2");
  title.textContent = model.name;
  const forms = document.createElement("p");
  forms.textContent = model.takes ? `takes ${model.takes}; gives ${model.gives}` : "no version is ready yet";
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of COLUMNS) {
    const made = document.createElement("th");
    made.textContent = name;
    head.append(made);
  }
  const body = table.createTBody();
  for (const version of model.versions) {
    const row = body.insertRow();
    cell(row, version.version);
    cell(row, version.step ?? "");
    cell(row, version.reason ? `${version.state}: ${version.reason}` : version.state, version.state);
    cell(row, percent(version.accuracy));
    cell(row, version.labels.join(", "));
    cell(row, percent(version.traffic));
    cell(row, version.requests);
    cell(row, milliseconds(version.p50_s));
    cell(row, milliseconds(version.p99_s));
  }
  part.append(title, forms, table);
  return part;
}

function offer(models) {
  const able = models.filter((model) => model.takes_pictures).map((model) => model.name);
  one("try").hidden = !able.length;
  const known = [...one("model").options].map((option) => option.value);
  if (known.join() === able.join()) return;
  one("model").replaceChildren(...able.map((name) => new Option(name, name)));
}

async function refresh() {
  try {
    const answer = await asked("/status");
    one("with-token").hidden = answer.status !== 401;
    if (!answer.ok) {
      one("said").textContent = (await answer.json()).error;
      return;
    }
    const status = await answer.json();
    const count = status.processes.living.length;
    one("said").textContent =
      `${count} model process${count === 1 ? "" : "es"}, ${status.processes.crashes} died since the start`;
    one("models").replaceChildren(...status.models.map(showModel));
    offer(status.models);
  } catch {
    one("said").textContent = "the server does not answer";
  }
}

async function classify() {
  const [file] = one("picture").files;
  if (!file) return;
  URL.revokeObjectURL(one("shown").src);
  one("shown").src = URL.createObjectURL(file);
  one("shown").hidden = false;
  const model = encodeURIComponent(one("model").value);
  const answer = await asked(`/predict?model=${model}`, { method: "POST", body: file });
  const found = await answer.json();
  const body = one("classes").tBodies[0];
  body.replaceChildren();
  one("classes").hidden = false;
  if (!answer.ok) {
    cell(body.insertRow(), found.error, "failed");
    return;
  }
  for (const seen of found.classes) {
    const row = body.insertRow();
    cell(row, seen.class);
    cell(row, percent(seen.probability));
  }
}

one("picture").addEventListener("change", classify);
one("model").addEventListener("change", classify);
one("with-token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = one("token").value;
  refresh();
});
refresh();
setInterval(refresh, 1000);
