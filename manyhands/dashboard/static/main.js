// Which page is shown, by what follows the # in the address; and light or dark.

import { el, svg, toast } from "./dom.js";
import { pushed } from "./net.js";
import { showRuns } from "./runs.js";
import { showRun } from "./run.js";
import { showCompare } from "./compare.js";
import { showNew } from "./new.js";

const main = document.getElementById("main");
let leave = () => {};

const PAGES = [
  [/^#\/run\/(.+)$/, "runs", (name) => showRun(main, decodeURIComponent(name))],
  [/^#\/compare\/(.+)$/, "runs", (names) => showCompare(main, names.split(",").map(decodeURIComponent))],
  [/^#\/new(?:\/(.+))?$/, "new", (from) => showNew(main, from ? decodeURIComponent(from) : null)],
  [/.*/, "runs", () => showRuns(main)],
];

async function show() {
  leave();
  pushed.leave();
  const address = location.hash || "#/";
  for (const [pattern, page, open] of PAGES) {
    const match = pattern.exec(address);
    if (!match) continue;
    for (const link of document.querySelectorAll("[data-page]")) {
      if (link.dataset.page === page) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    main.replaceChildren();
    scrollTo(0, 0);
    try {
      leave = (await open(match[1])) ?? (() => {});
    } catch (error) {
      toast(error.message);
      main.append(el("div", { class: "empty" }, el("h2", {}, error.message), el("a", { class: "button", href: "#/" }, "All runs")));
      leave = () => {};
    }
    return;
  }
}

const SUN = "M12 4V2m0 20v-2m8-8h2M2 12h2m13.7-5.7 1.4-1.4M4.9 19.1l1.4-1.4m11.4 0 1.4 1.4M4.9 4.9l1.4 1.4M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8Z";
const MOON = "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5Z";
const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const chosen = localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = chosen;
  const path = svg("path", { d: chosen === "dark" ? SUN : MOON, fill: "none", stroke: "currentColor", "stroke-width": 1.8, "stroke-linecap": "round", "stroke-linejoin": "round" });
  document.getElementById("theme").replaceChildren(svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, path));
  dispatchEvent(new Event("theme"));
}

document.getElementById("theme").addEventListener("click", () => {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  theme();
});
dark.addEventListener("change", theme);
addEventListener("hashchange", show);
theme();
show();
