// Elements and numbers. Text always goes in as text, so that no name of a run or a class becomes markup.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "width%") made.style.width = `${value}%`;
    else if (name === "height%") made.style.height = `${value}%`;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function percent(value, digits = 1) {
  return isNumber(value) ? `${(100 * value).toFixed(digits)} %` : "–";
}

export function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1000 ? count(value) : String(+value.toPrecision(4));
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${value < 10 && place ? value.toFixed(1) : Math.round(value)} ${units[place]}`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  if (hours >= 48) return `${Math.round(hours / 24)} d`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

export function ago(t) {
  const seconds = Date.now() / 1000 - t;
  return seconds < 5 ? "now" : `${duration(seconds < 60 ? seconds : Math.floor(seconds / 60) * 60).replace(" 0 s", "")} ago`;
}

// Places on an axis of time: short ones with a decimal.
export const moment = (seconds) => (Math.abs(seconds) < 10 && seconds % 1 ? `${seconds.toFixed(1)} s` : duration(seconds));

export const clock = (t) => new Date(1000 * t).toLocaleTimeString("en-GB");

export function panel(title, kind, ...children) {
  const header = el("header", {}, el("h2", {}, title));
  return { root: el("section", { class: `panel ${kind}`, "aria-label": title }, header, ...children), header };
}

export function segments(label, choices, chosen, choose) {
  const buttons = Object.entries(choices).map(([value, text]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), "data-value": value, onclick: () => press(value) }, text));
  const press = (value) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value));
    choose(value);
  };
  return el("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}

export function toast(text, isGood = false) {
  const note = el("div", { class: isGood ? "toast good" : "toast", role: isGood ? "status" : "alert" }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), isGood ? 4000 : 12000);
}

export function confirm(title, text, action) {
  return new Promise((resolve) => {
    const answer = (value) => () => { dialog.close(); dialog.remove(); resolve(value); };
    const dialog = el("dialog", { "aria-label": title, oncancel: answer(false) },
      el("h2", {}, title), el("p", {}, text),
      el("div", { class: "row" }, el("button", { type: "button", onclick: answer(false) }, "Cancel"),
        el("button", { type: "button", class: "danger", onclick: answer(true) }, action)));
    document.body.append(dialog);
    dialog.showModal();
  });
}

// A table of what a plot shows, for readers who do not see it and for numbers that are to be copied.
export function behind(rows) {
  const scroll = el("div", { class: "scroll", tabindex: "0" });
  const details = el("details", { class: "behind" }, el("summary", {}, "as a table"), scroll);
  details.addEventListener("toggle", () => { if (details.open) scroll.replaceChildren(tableOf(rows())); });
  return details;
}

export function tableOf({ head, body }) {
  return el("table", { class: "table" },
    el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, body.map((row) => el("tr", {}, row.map((value) => el("td", {}, isNumber(value) ? short(value) : String(value ?? "–")))))));
}

// A picture as the server sends it: bytes by row, column, channel.
export function paint(canvas, pixels) {
  const { width, height, channels } = pixels;
  const data = Uint8Array.from(atob(pixels.data), (letter) => letter.charCodeAt(0));
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  for (let at = 0; at < width * height; at += 1) {
    for (let part = 0; part < 3; part += 1) image.data[4 * at + part] = data[channels * at + (channels >= 3 ? part : 0)];
    image.data[4 * at + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
