// The graph of a model: nested modules that open and close, laid out by dagre.

import { el, panel } from "./dom.js";

export function graphPanel() {
  const { root } = panel("Model", "", el("p"));
  root.hidden = true;
  return { root };
}
