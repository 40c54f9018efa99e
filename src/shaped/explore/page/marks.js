// One function for each kind of series: what it spans, and how it is drawn.

import { formatNumber, measureText } from "./axes.js";
import { add, nameRole } from "./svg.js";

/** All values that a series has along an axis; an axis without ends is as long as these. */
export function listValues(series, axis) {
  switch (series.kind) {
    case "line":
    case "point":
      return [series[axis]].flat();
    case "band":
      return axis === "x" ? series.x : [...series.low, ...series.high];
    case "paths":
      return axis === "x" ? series.x : series.ys.flat();
    case "steps":
      return axis === "x" ? series.edges : [0, ...series.heights];
    case "cells":
      return axis === "x" ? series.x_edges : series.y_edges;
    default: // a rule stretches an axis only where it is near
      return [];
  }
}

/** A line with a gap wherever a value is missing. */
function trace(xs, ys, { x, y }) {
  let path = "";
  let drawing = false;
  for (let index = 0; index < xs.length; index += 1) {
    if (!x.accepts(xs[index]) || !y.accepts(ys[index])) {
      drawing = false;
      continue;
    }
    path += `${drawing ? "L" : "M"}${x(xs[index]).toFixed(1)} ${y(ys[index]).toFixed(1)}`;
    drawing = true;
  }
  return path;
}

function drawBand(layer, series, { x, y }) {
  const floor = (value) => (y.log && value !== null && value <= 0 ? y.low : value); // a band that ends at 0 on a log axis
  let run = [];
  let path = "";
  const close = () => {
    const upper = run.map(([at, , high]) => `${x(at).toFixed(1)} ${y(high).toFixed(1)}`);
    const lower = run.map(([at, low]) => `${x(at).toFixed(1)} ${y(low).toFixed(1)}`).reverse();
    if (run.length > 1) path += `M${[...upper, ...lower].join("L")}Z`;
    run = [];
  };
  series.x.forEach((at, index) => {
    const [low, high] = [floor(series.low[index]), series.high[index]];
    if (x.accepts(at) && y.accepts(low) && y.accepts(high)) run.push([at, low, high]);
    else close();
  });
  close();
  add(layer, "path", { d: path, class: `band ${nameRole(series.role)}` });
}

function drawSteps(layer, series, { x, y }) {
  const base = y.log ? y.low : Math.max(y.low, 0);
  let path = `M${x(series.edges[0]).toFixed(1)} ${y(base).toFixed(1)}`;
  series.heights.forEach((height, index) => {
    const at = y(y.accepts(height) ? height : base).toFixed(1);
    path += `V${at}H${x(series.edges[index + 1]).toFixed(1)}`;
  });
  add(layer, "path", { d: `${path}V${y(base).toFixed(1)}Z`, class: `steps ${nameRole(series.role)}` });
}

function drawRule(layer, series, { x, y }, labels) {
  const across = series.y !== undefined;
  const [scale, value] = across ? [y, series.y] : [x, series.x];
  if (!scale.accepts(value)) return;
  const beyond = value > scale.high ? 1 : value < scale.low ? -1 : 0;
  const at = beyond ? (beyond > 0 ? scale.end : scale.start) : scale(value);
  const arrow = across ? { 1: "↑ ", "-1": "↓ " } : { 1: "→ ", "-1": "← " };
  const text = beyond ? `${arrow[beyond]}${series.name}: ${formatNumber(value)}` : series.name;
  const ends = across ? { x1: x.start, x2: x.end, y1: at, y2: at } : { x1: at, x2: at, y1: y.start, y2: y.end };
  if (!beyond) add(layer, "line", { ...ends, class: `rule ${nameRole(series.role)}` });
  if (across) {
    const above = at - y.end > 14;
    add(labels, "text", { x: x.end - 3, y: above ? at - 4 : at + 11, class: "rule-label end" }, text);
  } else {
    const right = x.end - at > measureText(text, 10) + 8;
    add(labels, "text", { x: right ? at + 4 : at - 4, y: y.end + 10, class: right ? "rule-label" : "rule-label end" }, text);
  }
}

/** The share of colour for a value from 0 to 1; a root, so that 1 % differs from nothing. */
export function shade(value) {
  return Math.sqrt(Math.min(1, Math.max(0, value)));
}

function drawCells(layer, series, { x, y }) {
  const { x_edges: xs, y_edges: ys, values, outlined } = series;
  const inside = (row, column) => Boolean(outlined?.[row]?.[column]);
  let outline = "";
  values.forEach((line, row) =>
    line.forEach((value, column) => {
      const [left, right] = [x(xs[column]), x(xs[column + 1])];
      const [bottom, top] = [y(ys[row]), y(ys[row + 1])];
      const cell = add(layer, "rect", { x: Math.min(left, right), y: Math.min(top, bottom), width: Math.abs(right - left), height: Math.abs(bottom - top) });
      cell.setAttribute("class", value === null ? "cell empty" : "cell");
      if (value !== null) cell.style.setProperty("--share", shade(value));
      if (!inside(row, column)) return;
      if (!inside(row, column - 1)) outline += `M${left} ${bottom}V${top}`;
      if (!inside(row, column + 1)) outline += `M${right} ${bottom}V${top}`;
      if (!inside(row - 1, column)) outline += `M${left} ${bottom}H${right}`;
      if (!inside(row + 1, column)) outline += `M${left} ${top}H${right}`;
    }),
  );
  if (outline) add(layer, "path", { d: outline, class: "outline" });
}

/** A point beyond the axes stands at their end, as a hollow ring: it is not where it is drawn. */
function drawPoint(layer, series, { x, y }) {
  const [across, up] = [x, y].map((scale, index) => Math.min(scale.high, Math.max(scale.low, index ? series.y : series.x)));
  const outside = across !== series.x || up !== series.y;
  add(layer, "circle", { cx: x(across), cy: y(up), r: 5, class: `point ${nameRole(series.role)}${outside ? " outside" : ""}` });
}

export function drawSeries(layer, series, scales, labels) {
  const role = nameRole(series.role);
  switch (series.kind) {
    case "line":
      add(layer, "path", { d: trace(series.x, series.y, scales), class: `line ${role}` });
      break;
    case "paths":
      add(layer, "path", { d: series.ys.map((ys) => trace(series.x, ys, scales)).join(""), class: `paths ${role}` });
      break;
    case "band":
      drawBand(layer, series, scales);
      break;
    case "steps":
      drawSteps(layer, series, scales);
      break;
    case "rule":
      drawRule(layer, series, scales, labels);
      break;
    case "cells":
      drawCells(layer, series, scales);
      break;
    case "point":
      drawPoint(labels, series, scales);
      break;
  }
}

/** The sign of a series in the legend; those of a line and its band lie on each other. */
export function drawSwatch(layer, kind, role, x, y) {
  const names = `${kind} ${nameRole(role)}`;
  if (kind === "band" || kind === "steps") add(layer, "rect", { x, y: y - 4, width: 16, height: 8, class: names });
  else if (kind === "point") add(layer, "circle", { cx: x + 8, cy: y, r: 4.5, class: names });
  else if (kind === "outline") add(layer, "rect", { x: x + 1, y: y - 4.5, width: 14, height: 9, class: "outline" });
  else add(layer, "path", { d: kind === "paths" ? `M${x} ${y - 2.5}h16M${x} ${y + 2.5}h16` : `M${x} ${y}h16`, class: names });
}

const BAR_TICKS = [0, 0.01, 0.1, 0.25, 0.5, 1];

export function drawColourBar(layer, series, { x, y, width }) {
  const steps = 48;
  for (let index = 0; index < steps; index += 1) {
    const cell = add(layer, "rect", { x: x + (index * width) / steps, y, width: width / steps + 0.5, height: 8, class: "cell" });
    cell.style.setProperty("--share", (index + 0.5) / steps);
  }
  for (const tick of BAR_TICKS) {
    const at = x + shade(tick) * width;
    add(layer, "line", { x1: at, x2: at, y1: y + 8, y2: y + 11, class: "axis" });
    add(layer, "text", { x: at, y: y + 20, class: "tick middle" }, formatNumber(100 * tick));
  }
  add(layer, "text", { x, y: y - 4, class: "axis-label" }, `${series.name}, %`);
}
