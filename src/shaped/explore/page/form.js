// The controls, made from the server's list of fields. Bounds are checked here too, so that a bad value asks nothing.

import { formatNumber } from "./axes.js";

const STEPS = 1000; // of a slider on a log scale
const MANY = 20000; // whole numbers that no slider can reach one by one

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const showValue = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5))));

class Control {
  constructor(field, changed) {
    this.field = field;
    this.value = field.default;
    this.changed = changed;
    const { name, symbol, label, help } = field;
    this.tipButton = make("button", { type: "button", class: "help", "aria-label": `What is ${label}?`, "data-tip": help ?? "" }, "?");
    this.message = make("p", { class: "message", id: `message-${name}`, "aria-live": "polite" });
    const sign = symbol && symbol !== label ? make("span", { class: "symbol", "aria-hidden": "true" }, symbol) : "";
    this.label = make("label", { for: `field-${name}`, id: `label-${name}` }, sign, label);
    this.element = make("div", { class: `field ${field.kind}`, "data-field": name }, make("div", { class: "name" }, this.label, help ? this.tipButton : ""));
    this.build();
    this.element.append(this.message);
    this.set(field.default);
  }

  /** Within its own bounds; that the server refuses the whole question is said here too, but forgotten with the next change. */
  get valid() {
    return this.message.textContent === "" || this.refused;
  }

  complain(text, refused = false) {
    if (text === "" && this.refused) return; // a value within its bounds: the refusal stays until the form forgives it
    this.refused = refused;
    this.message.textContent = text;
    this.element.classList.toggle("bad", text !== "");
    this.input.setAttribute("aria-invalid", String(text !== ""));
  }

  /** A new value by hand; `settled` where the hand has let go. */
  take(value, settled) {
    this.set(value);
    this.changed(settled);
  }
}

class NumberControl extends Control {
  build() {
    const { name, low, high, label, scale } = this.field;
    this.whole = this.field.kind === "whole";
    this.log = scale === "log" && low > 0;
    this.input = make("input", { id: `field-${name}`, type: "text", inputmode: this.whole ? "numeric" : "decimal", autocomplete: "off", spellcheck: "false" });
    this.input.setAttribute("aria-describedby", `message-${name}`);
    this.input.addEventListener("input", () => this.read(false));
    this.input.addEventListener("change", () => this.read(true));
    this.input.addEventListener("keydown", (event) => this.nudge(event, ["ArrowUp"], ["ArrowDown"]));
    this.element.append(this.input);
    if (this.whole && !this.log && high - low > MANY) return;
    const step = this.log ? 1 : (this.field.step ?? (this.whole ? 1 : (high - low) / 200));
    const ends = this.log ? { min: 0, max: STEPS } : { min: low, max: high };
    this.slider = make("input", { type: "range", ...ends, step, "aria-label": `${label}, slider`, id: `slider-${name}` });
    this.slider.addEventListener("input", () => this.slide(false));
    this.slider.addEventListener("change", () => this.slide(true));
    this.slider.addEventListener("keydown", (event) => this.nudge(event, ["ArrowUp", "ArrowRight"], ["ArrowDown", "ArrowLeft"]));
    this.element.append(this.slider);
  }

  slide(settled) {
    const { low, high } = this.field;
    const at = Number(this.slider.value);
    const value = this.log ? low * (high / low) ** (at / STEPS) : at;
    const rounded = this.whole ? Math.round(value) : this.log ? Number(value.toPrecision(3)) : Number(value.toPrecision(6));
    const inside = this.fit(Math.min(high, Math.max(low, rounded)));
    if (settled || inside !== this.value) this.take(inside, settled);
  }

  /** Does a value go with other fields, as a divisor of one or a multiple? */
  goesWith(value) {
    const { divides, multiple_of: base } = this.field;
    const { values } = this.form;
    return (!values[divides] || values[divides] % value === 0) && (!values[base] || value % values[base] === 0);
  }

  /** The nearest value that goes with the other fields; with a sign, the nearest on that side. */
  fit(value, sign = 0) {
    const { low, high, divides, multiple_of: base } = this.field;
    if (!divides && !base) return value;
    for (let by = 0; by <= high - low; by += 1) {
      const found = (sign ? [value + sign * by] : [value - by, value + by]).find((each) => each >= low && each <= high && this.goesWith(each));
      if (found !== undefined) return found;
    }
    return sign ? this.value : value;
  }

  nudge(event, more, less) {
    const sign = more.includes(event.key) ? 1 : less.includes(event.key) ? -1 : 0;
    if (!sign || typeof this.value !== "number") return;
    event.preventDefault();
    const { low, high, step } = this.field;
    const large = event.shiftKey ? 5 : 1;
    let by = large * (step ?? (this.whole ? 1 : this.log ? 0.02 * this.value : (high - low) / 100));
    if (this.whole && this.log) by = Math.max(1, Math.round(0.02 * large * this.value));
    const value = this.value + sign * by;
    this.take(this.fit(Math.min(high, Math.max(low, this.whole ? Math.round(value) : Number(value.toPrecision(5)))), sign), true);
  }

  read(settled) {
    this.accept(this.input.value);
    this.placeSlider();
    this.changed(settled);
  }

  /** A text or a number becomes the value, or a message says why not. */
  accept(given) {
    const { low, high, name } = this.field;
    const text = String(given).trim().replace("−", "-");
    const number = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(text) ? Number(text) : NaN;
    const kind = this.whole ? "a whole number" : "a number";
    const right = (this.whole ? Number.isInteger(number) : Number.isFinite(number)) && number >= low && number <= high;
    this.complain(right ? "" : `${name} must be ${kind} from ${formatNumber(low)} to ${formatNumber(high)}, got ${text === "" ? "nothing" : text}`);
    if (right) this.value = number;
  }

  placeSlider() {
    if (!this.slider || !this.valid) return;
    const { low, high } = this.field;
    this.slider.value = this.log ? (STEPS * Math.log(this.value / low)) / Math.log(high / low) : this.value;
    this.slider.setAttribute("aria-valuetext", showValue(this.value));
    this.slider.style.setProperty("--filled", `${(100 * (this.slider.value - this.slider.min)) / (this.slider.max - this.slider.min)}%`);
  }

  set(given) {
    this.accept(given);
    this.input.value = this.valid ? showValue(this.value) : given;
    this.placeSlider();
  }
}

class ChoiceControl extends Control {
  build() {
    const { name, choices } = this.field;
    this.input = make("select", { id: `field-${name}`, "aria-describedby": `message-${name}` });
    for (const choice of choices) this.input.append(make("option", { value: choice }, choice));
    this.input.addEventListener("change", () => this.take(this.input.value, true));
    this.element.append(this.input);
  }

  set(given) {
    const known = this.field.choices.includes(given);
    this.complain(known ? "" : `${this.field.name} must be one of ${this.field.choices.join(", ")}, got ${given}`);
    if (known) this.input.value = this.value = given;
  }
}

class SwitchControl extends Control {
  build() {
    this.input = make("input", { id: `field-${this.field.name}`, type: "checkbox", role: "switch" });
    this.input.addEventListener("change", () => this.take(this.input.checked, true));
    this.element.append(this.input);
  }

  set(given) {
    const words = new Map([["true", true], ["1", true], ["false", false], ["0", false]]);
    const value = words.get(String(given).toLowerCase());
    this.complain(value === undefined ? `${this.field.name} must be true or false, got ${given}` : "");
    if (value !== undefined) this.input.checked = this.value = value;
  }
}

const KINDS = { whole: NumberControl, real: NumberControl, choice: ChoiceControl, switch: SwitchControl };

export class Form {
  /** `changed(settled)` is called after each change by hand. */
  constructor(host, fields, changed) {
    this.controls = new Map();
    for (const field of fields) {
      const control = new KINDS[field.kind](field, (settled) => {
        this.forgive();
        changed(settled);
      });
      control.form = this;
      this.controls.set(field.name, control);
      host.append(control.element);
    }
  }

  get valid() {
    return [...this.controls.values()].every((control) => control.valid);
  }

  get values() {
    return Object.fromEntries([...this.controls].map(([name, control]) => [name, control.value]));
  }

  /** Sets some values; all others keep theirs, or take their default with `reset`. */
  set(values, reset = false) {
    for (const [name, control] of this.controls) {
      if (Object.hasOwn(values, name)) control.set(values[name]);
      else if (reset) control.set(control.field.default);
    }
    this.forgive();
  }

  /** Another question than the refused one: the refusal is forgotten. A field that is only left keeps it. */
  forgive() {
    if (JSON.stringify(this.values) === this.refused) return;
    for (const control of this.controls.values()) {
      if (!control.refused) continue;
      control.refused = false;
      control.complain("");
    }
  }

  /** Shows why the server refused; true where there is such a field to show it at. */
  complain(name, text) {
    this.refused = JSON.stringify(this.values);
    this.controls.get(name)?.complain(text, true);
    this.controls.get(name)?.element.scrollIntoView({ block: "nearest" });
    return this.controls.has(name);
  }
}
