// Try the trained model on a drawing, or on a row of numbers.

import { el, paint, panel, percent } from "./dom.js";
import { ask, runPath } from "./net.js";

const SIZE = 224;

export function tryPanel(run) {
  const place = el("div", {}, el("button", { type: "button", id: "try", onclick: open }, "Try the model"));
  const { root } = panel("Try the trained model", "", el("p", { class: "quiet" }, "The newest checkpoint, asked in a process of its own."), place);

  async function open() {
    place.replaceChildren(el("p", { class: "quiet" }, "loading the model …"));
    try {
      const shape = await ask(runPath(run.name, "/shape"));
      place.replaceChildren(shape.shape.length === 3 ? drawing(shape) : numbers(shape));
    } catch (error) {
      place.replaceChildren(el("p", { class: "problem" }, error.message), el("button", { type: "button", class: "small", onclick: open }, "Try again"));
    }
  }

  function answers() {
    const list = el("div", { class: "answer", "aria-live": "polite", id: "answer" });
    const seen = el("canvas", { class: "seen", hidden: true, role: "img", "aria-label": "What the model sees" });
    const problem = el("p", { class: "quiet" });
    return { root: el("div", {}, list, problem, seen), async show(body) {
      try {
        const answer = await ask(runPath(run.name, "/try"), { method: "POST", body });
        problem.textContent = `step ${answer.step}`;
        list.replaceChildren(...answer.top.flatMap((one, place) => [
          el("span", { class: place ? "" : "best" }, String(one.class)), el("div", { class: "meter" }, el("i", { "width%": 100 * one.probability })), el("span", {}, percent(one.probability))]));
        if (answer.seen) { seen.hidden = false; paint(seen, answer.seen); }
      } catch (error) { problem.textContent = error.message; }
    } };
  }

  function drawing({ shape }) {
    const answer = answers();
    const canvas = el("canvas", { class: "draw", width: SIZE, height: SIZE, "aria-label": "Draw here", id: "drawing" });
    const ink = canvas.getContext("2d", { willReadFrequently: true });
    const clear = () => { ink.fillStyle = "#000"; ink.fillRect(0, 0, SIZE, SIZE); };
    clear();
    Object.assign(ink, { strokeStyle: "#fff", lineWidth: 20, lineCap: "round", lineJoin: "round" });
    let last = null;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [((event.clientX - box.left) * SIZE) / box.width, ((event.clientY - box.top) * SIZE) / box.height]; };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); last = at(event); stroke(event); });
    canvas.addEventListener("pointermove", (event) => { if (last) stroke(event); });
    canvas.addEventListener("pointerup", () => { last = null; recognise(); });
    function stroke(event) {
      const here = at(event);
      ink.beginPath();
      ink.moveTo(...last);
      ink.lineTo(here[0], here[1] + 0.01);
      ink.stroke();
      last = here;
    }
    function recognise() {
      const side = 56; // the server makes it as large as the data's pictures
      const small = el("canvas", { width: side, height: side }).getContext("2d");
      small.drawImage(canvas, 0, 0, side, side);
      const { data } = small.getImageData(0, 0, side, side);
      answer.show({ drawing: { width: side, height: side, ink: Array.from({ length: side * side }, (_, place) => Math.round((100 * data[4 * place]) / 255) / 100) } });
    }
    return el("div", { class: "try" }, el("div", {}, canvas, el("div", { class: "row" }, el("button", { type: "button", class: "small", onclick: clear }, "Clear"), el("span", { class: "quiet" }, `scaled to ${shape[1]}×${shape[2]}`))), answer.root);
  }

  function numbers({ shape }) {
    const answer = answers();
    const needed = shape.reduce((product, length) => product * length, 1);
    const text = el("textarea", { rows: "4", "aria-label": `${needed} numbers`, placeholder: `${needed} numbers, with spaces or commas between them` });
    const show = () => answer.show({ numbers: text.value.split(/[\s,;]+/).filter(Boolean).map(Number) });
    return el("div", { class: "try" }, el("div", {}, text, el("button", { type: "button", onclick: show }, "Ask")), answer.root);
  }
  return { root, draw: () => { root.hidden = !run.plan; } };
}
