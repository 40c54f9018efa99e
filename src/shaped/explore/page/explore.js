// The page: reads the form, asks, shows what comes, and keeps the question in the address.

import { formatNumber } from "./axes.js";
import { Asker, getJson, sendConfig } from "./asking.js";
import { Form } from "./form.js";
import { Panels } from "./panels.js";
import { copyFrom } from "./saving.js";
import { followTips } from "./tips.js";

const NETWORK = [
  ["paths", "Correlation of the tokens"], ["density", "Correlation at the last layer"], ["eigenvalue", "Largest eigenvalue"],
  ["map", "Gamma and tau0"], ["gradients", "Gradients"], ["entropy", "Entropy of the attention"],
];
const BLOCKS = [["blocks", "Correlation"], ["blocks_length", "Length of the stream"], ["blocks_gradients", "Gradients"], ["blocks_entropy", "Entropy"]];
const WAITS = [1000, 2000, 4000, 8000]; // between attempts to reach a server that is gone, in milliseconds

const find = (id) => document.getElementById(id);
const say = (text) => (find("said").textContent = text);
const readAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
let form;
let question = null; // the line of the answer on show
let frame = 0;
let attempt = 0;
let timer = 0;
let moving = false; // a slider is held: the address follows without new entries in the history

const panels = new Panels([[find("network"), NETWORK], [find("blocks"), BLOCKS]], {
  map: (gamma, tau0) => setValues({ gamma: Number(gamma.toPrecision(3)), tau0: Number(tau0.toPrecision(3)) }),
});

function toggleControls(open) {
  const isOpen = find("controls").classList.toggle("open", open);
  find("toggle").setAttribute("aria-expanded", String(isOpen));
}

function showBanner(text, canRetry = false) {
  find("banner").hidden = text === "";
  find("banner-text").textContent = text;
  find("retry").hidden = !canRetry;
}

function lose() {
  const wait = WAITS[Math.min(attempt, WAITS.length - 1)];
  attempt += 1;
  find("progress").textContent = "";
  showBanner("The server does not answer. Is “shaped explore” still running? Trying again …", true);
  clearTimeout(timer);
  timer = setTimeout(tryAgain, wait);
}

function tryAgain() {
  clearTimeout(timer);
  if (form) ask();
  else start();
}

const HEARD = {
  question(line) {
    question = line;
    attempt = 0;
    showBanner("");
    find("code").disabled = false;
  },
  panel(line) {
    panels.show(line);
    const stage = ["coarse", "finer", "fine"][line.stage] ?? "";
    find("progress").textContent = `${stage} answer`;
    find("progress").dataset.busy = "true";
  },
  error(line) {
    showBanner(line.error);
    settle("");
  },
  done(line) {
    panels.finish();
    settle(`final after ${formatNumber(line.seconds, 2)} s`);
    say(`The answer is final after ${formatNumber(line.seconds, 2)} seconds`);
    showState();
  },
};

function settle(text) {
  find("progress").textContent = text;
  delete find("progress").dataset.busy;
}

function refuse(error) {
  settle("");
  if (form.complain(error.field, error.message)) toggleControls(true);
  else showBanner(error.message);
}

async function showState() {
  const state = await getJson("state").catch(() => null);
  if (!state) return;
  const memory = state.memory_mb === null ? "" : `, memory ${Math.round(state.memory_mb)} MB`; // not every system tells
  find("state").textContent = `Since the server's start: answers ${state.finished}, cancelled ${state.cancelled}, under way ${state.running}${memory}.`;
}

function begin() {
  panels.fade();
  find("progress").textContent = "asking …";
  find("progress").dataset.busy = "true";
}

const asker = new Asker({ begin, hear: (line) => HEARD[line.kind]?.(line), refuse, lose, panels: NETWORK.length + BLOCKS.length });

function ask() {
  cancelAnimationFrame(frame);
  frame = 0;
  clearTimeout(timer);
  asker.ask(form.values);
}

/** At most one question a frame, however many events there are. */
function askSoon() {
  if (!frame) frame = requestAnimationFrame(ask);
}

/** A new entry of the history for each move, not for each pixel of it. */
function keepInAddress(settled) {
  const address = `#${new URLSearchParams(form.values)}`;
  if (address !== location.hash) history[moving ? "replaceState" : "pushState"](null, "", address);
  moving = !settled;
}

/** Nothing is asked while a value is out of its bounds; on a phone the settings open, to show which. */
function checkForm() {
  if (form.valid) return true;
  asker.stop();
  settle("a setting needs a correction");
  toggleControls(true);
  return false;
}

function change(settled) {
  if (!checkForm()) return;
  const asked = location.hash;
  keepInAddress(settled);
  if (location.hash !== asked) askSoon();
}

function setValues(values, reset = false) {
  form.set(values, reset);
  moving = false;
  change(true);
}

function restore() {
  moving = false;
  form.set(readAddress(), true);
  if (checkForm()) askSoon();
}

async function openConfig(file) {
  const notes = find("config-notes");
  notes.className = "config-notes";
  try {
    const answer = await sendConfig(await file.text());
    const lines = [`${file.name} is set.`, ...answer.notes].map((text) => Object.assign(document.createElement("p"), { textContent: text }));
    notes.replaceChildren(...lines);
    setValues(answer.values);
  } catch (error) {
    notes.classList.add("bad");
    notes.textContent = error instanceof TypeError ? "The server does not answer." : error.message;
  }
}

function showCode() {
  find("python").textContent = question.python;
  find("command").textContent = question.command;
  find("code-dialog").showModal();
}

function connectButtons() {
  find("code").addEventListener("click", showCode);
  find("code-dialog").addEventListener("click", (event) => event.target === event.currentTarget && event.currentTarget.close());
  find("copy-python").addEventListener("click", ({ target }) => copyFrom(target, question.python));
  find("copy-command").addEventListener("click", ({ target }) => copyFrom(target, question.command));
  find("link").addEventListener("click", ({ target }) => copyFrom(target, location.href));
  find("reset").addEventListener("click", () => {
    find("config-notes").replaceChildren();
    setValues({}, true);
  });
  find("retry").addEventListener("click", tryAgain);
  find("toggle").addEventListener("click", () => toggleControls());
  find("config").addEventListener("change", ({ target }) => {
    if (target.files[0]) openConfig(target.files[0]);
    target.value = "";
  });
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dropping"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files[0]) openConfig(event.dataTransfer.files[0]);
  });
  // By hand: a link to a place of the page would take the question out of the address.
  find("skip").addEventListener("click", (event) => {
    event.preventDefault();
    find("panels").focus();
  });
  addEventListener("popstate", () => form && restore());
  // A page that is left may be kept by the browser for some seconds, with its question; if it comes back, it asks again.
  addEventListener("pagehide", () => asker.stop());
  addEventListener("pageshow", (event) => event.persisted && form && asker.ask(form.values));
}

async function start() {
  try {
    const { fields } = await getJson("fields");
    form = new Form(find("fields"), fields, change);
    history.replaceState(null, "", location.hash || `#${new URLSearchParams(form.values)}`);
    restore();
  } catch (error) {
    if (error instanceof TypeError) lose();
    else showBanner(error.message);
  }
}

connectButtons();
followTips(find("tip"), document.body);
start();
