// The grid of panels: each has a picture, notes, a table of its numbers, and a mark that says how fine the answer is.

import { formatNumber } from "./axes.js";
import { drawChart } from "./charts.js";
import { attachReadout } from "./readout.js";
import { copyFrom, download, writeSvg } from "./saving.js";
import { renderTables, writeTabs } from "./tables.js";

const STAGES = ["coarse", "finer", "final"];
const HEIGHT = 236;

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

class Panel {
  constructor(id, title, pick) {
    this.id = id;
    this.pick = pick;
    this.line = null;
    this.heading = make("h3", {}, title);
    this.about = make("button", { type: "button", class: "help", "aria-label": "What is seen here?", hidden: "" }, "?");
    this.mark = make("p", { class: "mark" });
    this.picture = make("div", { class: "picture", tabindex: "0", role: "group" });
    this.trouble = make("p", { class: "trouble" });
    this.notes = make("ul", { class: "notes" });
    this.save = make("button", { type: "button" }, "Save SVG");
    this.copy = make("button", { type: "button" }, "Copy numbers");
    this.tables = make("div", { class: "tables", tabindex: "0", role: "region" });
    this.details = make("details", {}, make("summary", {}, "Numbers"), this.copy, this.tables);
    this.element = make("article", { class: "panel waiting", id: `panel-${id}` }, make("header", {}, make("div", { class: "name" }, this.heading, this.about), this.mark), this.picture);
    this.element.append(this.trouble, this.notes, make("div", { class: "tools" }, this.details, this.save));
    this.save.addEventListener("click", () => download(`shaped-${this.id}.svg`, writeSvg(this.drawn.svg, this.line.chart.title), "image/svg+xml"));
    this.copy.addEventListener("click", () => copyFrom(this.copy, writeTabs(this.line.chart)));
    this.details.addEventListener("toggle", () => this.fillTables());
    this.picture.addEventListener("keydown", (event) => this.reader?.move(event));
    this.picture.addEventListener("blur", () => this.reader?.hide());
    this.save.disabled = this.copy.disabled = true;
  }

  show(line) {
    this.line = line;
    this.element.classList.remove("waiting", "stale");
    this.element.classList.toggle("failed", line.error !== undefined);
    this.trouble.textContent = line.error ?? "";
    this.save.disabled = this.copy.disabled = !line.chart;
    if (line.chart) this.draw();
    else {
      this.picture.replaceChildren();
      this.notes.replaceChildren();
      this.reader = this.drawn = null;
    }
    this.fillTables();
    this.markStage(line.stage);
  }

  markStage(stage) {
    this.element.dataset.stage = stage;
    if (this.line?.error !== undefined) return this.mark.replaceChildren();
    const { samples, seconds } = this.line;
    const parts = [STAGES[stage]];
    if (Number.isFinite(samples)) parts.push(`${samples.toLocaleString("en")} samples`);
    if (Number.isFinite(seconds)) parts.push(`${formatNumber(seconds, 2)} s`);
    this.mark.replaceChildren(make("i", { class: `dots dots-${stage}`, "aria-hidden": "true" }), parts.join(" · "));
  }

  draw() {
    const { chart } = this.line;
    const width = Math.floor(this.picture.clientWidth);
    if (!width) return;
    const place = this.reader?.standing();
    this.heading.textContent = chart.title;
    this.drawn = drawChart(chart, width, HEIGHT);
    this.picture.replaceChildren(this.drawn.svg);
    this.picture.setAttribute("aria-label", `${chart.title}: the arrow keys read the values`);
    this.tables.setAttribute("aria-label", `${chart.title}: numbers`);
    this.reader = attachReadout(this.picture, chart, this.drawn, this.pick);
    if (place) this.reader.standAt(place);
    this.about.dataset.tip = chart.about;
    this.about.hidden = !chart.about;
    this.notes.replaceChildren(...(chart.notes ?? []).map((note) => make("li", {}, note)));
  }

  fillTables() {
    this.tables.replaceChildren(...(this.details.open && this.line?.chart ? renderTables(this.line.chart) : []));
  }
}

export class Panels {
  /** `places`: where panels go, as [element, [[id, title], …]]; `picks`: what a click on a panel's cell does. */
  constructor(places, picks) {
    this.panels = new Map();
    this.pending = new Map();
    this.drawing = false;
    this.picks = picks;
    this.last = places.at(-1)[0];
    for (const [host, list] of places) for (const [id, title] of list) this.place(host, id, title);
    const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => this.redraw(target)));
    for (const panel of this.panels.values()) sizes.observe(panel.picture);
  }

  place(host, id, title) {
    const panel = new Panel(id, title, this.picks[id]);
    this.panels.set(id, panel);
    host.append(panel.element);
    return panel;
  }

  redraw(picture) {
    for (const panel of this.panels.values()) {
      const grown = panel.picture === picture && panel.drawn && Number(panel.drawn.svg.getAttribute("width")) !== Math.floor(picture.clientWidth);
      if (grown) panel.draw();
    }
  }

  /** A new question is under way: the old pictures stay, faded. */
  fade() {
    this.pending.clear();
    for (const { element } of this.panels.values()) element.classList.add("stale");
  }

  /** Draws in the next frame; of two answers for one panel only the later. */
  show(line) {
    this.pending.set(line.panel, line);
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      for (const [id, each] of this.pending) (this.panels.get(id) ?? this.place(this.last, id, id)).show(each);
      this.pending.clear();
    });
  }

  /** Nothing finer will come. */
  finish() {
    requestAnimationFrame(() => {
      for (const panel of this.panels.values()) if (panel.line && !panel.element.classList.contains("stale")) panel.markStage(2);
    });
  }
}
