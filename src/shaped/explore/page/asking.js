// Questions to the server: one at a time, the newest wins.

export class Refused extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

async function readError(response) {
  const body = await response.json().catch(() => ({}));
  return new Refused(body.error ?? `the server answered with status ${response.status}`, body.field);
}

/** One JSON object a line, as they come. */
async function* readLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
  }
}

export async function getJson(path) {
  const response = await fetch(path);
  if (!response.ok) throw await readError(response);
  return response.json();
}

export async function sendConfig(text) {
  const response = await fetch("config", { method: "POST", body: text, headers: { "Content-Type": "application/json" } });
  if (!response.ok) throw await readError(response);
  return response.json();
}

export class Asker {
  /** `hear(line)` gets each line; `refuse(error)` a refusal of the server; `lose()` is called when it is gone. */
  constructor({ hear, refuse, lose }) {
    Object.assign(this, { hear, refuse, lose });
    this.running = null;
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  async ask(values) {
    this.stop();
    const mine = (this.running = new AbortController());
    let ended = false;
    try {
      const response = await fetch(`answer?${new URLSearchParams(values)}`, { signal: mine.signal });
      if (!response.ok) throw await readError(response);
      for await (const line of readLines(response.body)) {
        if (mine.signal.aborted) return;
        ended = line.kind === "done" || line.kind === "error";
        this.hear(line);
      }
      if (!ended) throw new TypeError("the answer broke off");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Refused) this.refuse(error);
      else if (!ended) this.lose(error);
    } finally {
      if (this.running === mine) this.running = null;
    }
  }
}
