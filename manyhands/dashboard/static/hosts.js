// What each host uses: processor, memory, network.

import { behind, bytes, clock, count, moment, el, panel, percent } from "./dom.js";
import { Plot, joined } from "./plot.js";
import { withGaps } from "./curves.js";

const MOST_LINES = 8;
const COLOURS = ["c1", "c3", "c4", "c2", "c5", "c6", "c7", "c8"];

export function hostsPanel(run) {
  const cpu = { root: el("div", { class: "third" }) };
  const memory = { root: el("div", { class: "third" }) };
  const network = { root: el("div", { class: "third" }) };
  const table = behind(() => ({
    head: ["host", "process", "cores in use", "memory"],
    body: Object.entries(run.hosts ?? {}).flatMap(([host, now]) => Object.entries(now.processes ?? {}).map(([name, one]) => [host, name, one.cores.toFixed(2), bytes(one.memory_bytes)])),
  }));
  const now = el("p", { class: "quiet" });
  const { root, header } = panel("Hosts", "", el("div", { class: "grid" }, cpu.root, memory.root, network.root), table);
  header.append(el("span", { class: "spacer" }), now);
  let plots = [];
  let drawn = "";

  function build(hosts) {
    for (const plot of plots) plot.destroy();
    const lines = (suffix = "") => hosts.map((host, at) => ({ name: hosts.length > 1 ? `host ${host}${suffix}` : suffix.trim() || "host", colour: COLOURS[at], format: (value) => percent(value, 0) }));
    const options = { from0: true, keepsGaps: true, height: 170, xLabel: "time", xFormat: moment };
    const shares = { ...options, yFormat: (value) => percent(value, 0), range: () => [0, 1] };
    const rates = ["sent", "received"].flatMap((way, place) => hosts.map((host, at) => ({ name: `${hosts.length > 1 ? `host ${host} ` : ""}${way}`, colour: COLOURS[(at + 2 * place) % COLOURS.length], dash: place ? [4, 3] : undefined, format: (value) => `${bytes(value)}/s` })));
    plots = [new Plot(lines(" cores"), { ...shares, label: "Busy part of the cores" }), new Plot(lines(" memory"), { ...shares, label: "Used part of the memory" }), new Plot(rates, { ...options, label: "Bytes per second over the network", yFormat: bytes })];
    cpu.root.replaceChildren(el("h3", {}, "Processor"), plots[0].root);
    memory.root.replaceChildren(el("h3", {}, "Memory"), plots[1].root);
    network.root.replaceChildren(el("h3", {}, "Network"), plots[2].root);
  }

  function draw() {
    const hosts = Object.keys(run.hosts ?? {}).slice(0, MOST_LINES);
    root.hidden = !hosts.length;
    if (!hosts.length) return;
    if (drawn !== hosts.join()) { drawn = hosts.join(); build(hosts); }
    const first = run.head.first_t;
    const table = (what) => joined(hosts.map((host) => { const { x, mean } = run.curves.get(`host ${host}:${what}`); return withGaps(x.map((t) => t - first), mean, 5); }));
    plots[0].set(table("cpu"));
    plots[1].set(table("memory"));
    const [sent, received] = [table("sent"), table("received")];
    plots[2].set(joined([sent, received]));
    const one = run.hosts[hosts[0]];
    now.textContent = hosts.length > 1 ? `${count(Object.keys(run.hosts).length)} hosts`
      : `${count(one.cores)} cores, ${bytes(one.memory_total_bytes)} of memory${run.head.last_t ? `, at ${clock(run.head.last_t)}` : ""}`;
  }
  return { root, draw, leave: () => { for (const plot of plots) plot.destroy(); } };
}
