// Questions to the server, and its answers line by line.

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

const PATIENCE = 250; // milliseconds without a picture, after which a question is no longer cancelled before its coarse answer

/** One question at a time; a new one cancels the old.
 *
 * A hand that moves a slider without rest asks in every frame, and no answer would ever come. So after a while without a picture one
 * question is let through to its coarse answer, and the newest waits for that long.
 */
export class Asker {
  /** `begin()` is called with each question that is sent; `hear(line)` gets each line of its answer; `refuse(error)` a refusal of the
   * server; `lose()` is called when it is gone; `panels`: how many there are. */
  constructor({ begin, hear, refuse, lose, panels }) {
    Object.assign(this, { begin, hear, refuse, lose, panels });
    this.running = null; // cancels the question under way
    this.missing = null; // panels that have no coarse answer yet
    this.since = null; // when the first question was asked that has no coarse answer
    this.next = null; // values that wait
  }

  stop() {
    this.running?.abort();
    this.running = this.missing = this.since = this.next = null;
  }

  ask(values) {
    const hungry = this.since !== null && performance.now() - this.since > PATIENCE;
    if (this.running && hungry && this.missing > 0) {
      this.next = values;
      return;
    }
    const since = this.missing > 0 ? this.since : null;
    this.stop();
    this.since = since ?? performance.now();
    this.missing = this.panels;
    this.begin();
    this.follow(values);
  }

  /** The coarse answer is whole, or will not come: what waits is asked. */
  goOn() {
    this.missing = this.since = null;
    const next = this.next;
    if (next) this.ask(next);
  }

  async follow(values) {
    const mine = (this.running = new AbortController());
    let ended = false;
    try {
      const response = await fetch(`answer?${new URLSearchParams(values)}`, { signal: mine.signal });
      if (!response.ok) throw await readError(response);
      for await (const line of readLines(response.body)) {
        if (mine.signal.aborted) return;
        ended = line.kind === "done" || line.kind === "error";
        this.hear(line);
        if (line.kind === "panel" && line.stage === 0) this.missing -= 1;
        if (this.missing === 0) this.goOn();
      }
      if (!ended) throw new TypeError("the answer broke off");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Refused) this.refuse(error);
      else if (!ended) this.lose(error);
    } finally {
      if (this.running === mine) {
        this.running = null;
        this.goOn();
      }
    }
  }
}
