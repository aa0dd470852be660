// Questions to the server, and what it pushes.

export async function ask(path, options = {}) {
  const { body, ...rest } = options;
  let answer;
  try {
    answer = await fetch(path, {
      ...rest,
      ...(body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } }),
    });
  } catch {
    throw new Error("the page's server does not answer; is `manyhands dash` still running?");
  }
  if (answer.status === 401) { location.href = "/sign-in"; throw new Error("sign in first"); }
  if (options.raw) return answer;
  const found = await answer.json().catch(() => ({ error: `the server has answered with ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error ?? `the server has answered with ${answer.status}`);
  return found;
}

export const runPath = (name, rest = "") => `/runs/${encodeURIComponent(name)}${rest}`;

// One WebSocket for the whole page. It comes back by itself, and asks again for what the page shows.
class Pushed {
  constructor() {
    this.wish = null;
    this.hear = () => {};
    this.tries = 0;
    this.open();
  }

  open() {
    this.socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/live`);
    this.socket.onopen = () => { this.tries = 0; this.tell("live", false); this.send(); };
    this.socket.onmessage = (event) => this.hear(JSON.parse(event.data));
    this.socket.onclose = () => {
      this.tell("not connected, trying again …", true);
      this.tries += 1;
      if (this.tries === 4) fetch("/choices").then((answer) => { if (answer.status === 401) location.href = "/sign-in"; }).catch(() => {});
      setTimeout(() => this.open(), Math.min(5000, 250 * 2 ** this.tries));
    };
  }

  tell(text, isLost) {
    const sign = document.getElementById("connection");
    sign.textContent = text;
    sign.classList.toggle("lost", isLost);
  }

  watch(run, hear) {
    this.wish = { run };
    this.hear = hear;
    this.send();
  }

  leave() {
    this.hear = () => {};
  }

  send() {
    if (this.wish && this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(this.wish));
  }
}

export const pushed = new Pushed();
