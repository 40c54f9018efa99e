// The values under the pointer, the finger or the arrow keys.

import { formatNumber } from "./axes.js";
import { add, nameRole } from "./svg.js";

function findNearest(values, wanted) {
  let best = -1;
  for (let index = 0; index < values.length; index += 1) {
    if (values[index] !== null && (best < 0 || Math.abs(values[index] - wanted) < Math.abs(values[best] - wanted))) best = index;
  }
  return best;
}

function findBin(edges, wanted) {
  return edges.findIndex((edge, index) => index + 1 < edges.length && edge <= wanted && wanted <= edges[index + 1]);
}

/** Where the crosshair may stand: at the values of x of lines and bands, or in the middle of bins. */
export function listStops(chart) {
  const stops = new Set();
  for (const series of chart.series) {
    if (series.kind === "line" || series.kind === "band" || series.kind === "paths") series.x.forEach((value) => stops.add(value));
    if (series.kind === "steps") series.edges.slice(1).forEach((edge, index) => stops.add((edge + series.edges[index]) / 2));
  }
  return [...stops].filter((value) => value !== null).sort((a, b) => a - b);
}

/** What each series has at x: its name, its value as text, and where the value lies. */
export function readAt(chart, at) {
  const rows = [];
  for (const series of chart.series) {
    if (series.kind === "line") {
      const value = series.y[findNearest(series.x, at)];
      rows.push({ series, text: formatNumber(value), value });
    } else if (series.kind === "band") {
      const index = findNearest(series.x, at);
      rows.push({ series, text: `${formatNumber(series.low[index])} to ${formatNumber(series.high[index])}`, value: null });
    } else if (series.kind === "steps") {
      const bin = findBin(series.edges, at);
      if (bin >= 0) rows.push({ series, text: formatNumber(series.heights[bin]), value: series.heights[bin] });
    }
  }
  return rows;
}

/** The cell at a place, or null. */
export function readCell(chart, x, y) {
  const series = chart.series.find(({ kind }) => kind === "cells");
  if (!series) return null;
  const [column, row] = [findBin(series.x_edges, x), findBin(series.y_edges, y)];
  return column < 0 || row < 0 ? null : { series, row, column, ...describeCell(chart, series, row, column) };
}

function describeCell(chart, series, row, column) {
  const middle = (edges, index, axis) => (axis.scale === "log" ? Math.sqrt(edges[index] * edges[index + 1]) : (edges[index] + edges[index + 1]) / 2);
  const [x, y] = [middle(series.x_edges, column, chart.x), middle(series.y_edges, row, chart.y)];
  const value = series.values[row][column];
  const text = series.labels?.[row]?.[column] ?? (value === null ? "no answer" : `${formatNumber(100 * value, 3)} %`);
  return { x, y, text };
}

function fillBox(box, heading, rows) {
  const title = document.createElement("b");
  title.textContent = heading;
  const lines = rows.map(({ series, text }) => {
    const line = document.createElement("div");
    const sign = document.createElement("i");
    const name = document.createElement("span");
    const value = document.createElement("span");
    sign.className = `sign ${nameRole(series.role)}`;
    name.textContent = series.name;
    value.textContent = text;
    value.className = "number";
    line.append(sign, name, value);
    return line;
  });
  box.replaceChildren(title, ...lines);
}

/** Puts a crosshair on a drawn chart. `pick` is called with x and y when a cell is chosen. */
export function attachReadout(host, chart, { svg, x, y }, pick) {
  const stops = listStops(chart);
  const cells = chart.series.find(({ kind }) => kind === "cells");
  const marks = add(svg, "g", { class: "crosshair" });
  const box = document.createElement("div");
  box.className = "readout";
  box.setAttribute("role", "status");
  box.hidden = true;
  host.append(box);
  let stop = null;
  let cell = null;

  const hide = () => {
    marks.replaceChildren();
    box.hidden = true;
    stop = cell = null;
  };
  const placeBox = (left, top) => {
    box.hidden = false;
    const room = host.clientWidth;
    const wide = box.offsetWidth;
    box.style.left = `${Math.max(0, Math.min(room - wide, left + 12 + wide > room ? left - wide - 12 : left + 12))}px`;
    box.style.top = `${Math.max(0, top)}px`;
  };
  const showStop = (index) => {
    stop = index;
    const at = stops[index];
    const rows = readAt(chart, at);
    marks.replaceChildren();
    add(marks, "line", { x1: x(at), x2: x(at), y1: y.start, y2: y.end });
    for (const { series, value } of rows) {
      if (series.kind === "line" && y.accepts(value ?? null)) add(marks, "circle", { cx: x(at), cy: y(value), r: 3, class: nameRole(series.role) });
    }
    fillBox(box, `${chart.x.label} ${formatNumber(at)}`, rows);
    placeBox(x(at), y.start + 20); // under the axis, where it hides no curve
  };
  const showCell = (found) => {
    cell = found;
    marks.replaceChildren();
    const [left, right] = [x(cells.x_edges[found.column]), x(cells.x_edges[found.column + 1])];
    const [low, high] = [y(cells.y_edges[found.row]), y(cells.y_edges[found.row + 1])];
    add(marks, "rect", { x: left, y: high, width: right - left, height: low - high });
    const heading = `${chart.x.label} ${formatNumber(found.x, 3)}, ${chart.y.label} ${formatNumber(found.y, 3)}`;
    fillBox(box, heading, [{ series: cells, text: found.text }]);
    placeBox(right, y.start + 20);
  };
  const follow = (event) => {
    const area = svg.getBoundingClientRect();
    const [across, down] = [event.clientX - area.left, event.clientY - area.top];
    if (across < x.start - 8 || across > x.end + 8 || down < y.end - 8 || down > y.start + 8) return hide();
    if (cells) {
      const found = readCell(chart, x.invert(across), y.invert(down));
      return found ? showCell(found) : hide();
    }
    return stops.length ? showStop(findNearest(stops.map(x), across)) : hide();
  };
  const move = (event) => {
    const [right, up] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key] ?? [0, 0];
    if (event.key === "Escape") return hide();
    if (event.key === "Enter" && cell) return pick?.(cell.x, cell.y);
    if (cells && (right || up)) {
      const here = chart.series.find(({ kind }) => kind === "point");
      const from = cell ?? readCell(chart, here?.x, here?.y) ?? { row: 0, column: 0 };
      const row = Math.min(cells.values.length - 1, Math.max(0, from.row + (cell ? up : 0)));
      const column = Math.min(cells.values[row].length - 1, Math.max(0, from.column + (cell ? right : 0)));
      showCell({ row, column, ...describeCell(chart, cells, row, column) });
    } else if (stops.length && right) {
      const stride = right * (event.shiftKey ? Math.max(1, Math.round(stops.length / 20)) : 1);
      showStop(stop === null ? (right > 0 ? 0 : stops.length - 1) : Math.min(stops.length - 1, Math.max(0, stop + stride)));
    } else if (stops.length && (event.key === "Home" || event.key === "End")) {
      showStop(event.key === "Home" ? 0 : stops.length - 1);
    } else return;
    event.preventDefault();
  };

  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", hide);
  if (pick) svg.addEventListener("click", () => cell && pick(cell.x, cell.y));
  const standing = () => (cell ? { x: cell.x, y: cell.y } : stop === null ? null : { x: stops[stop] });
  const standAt = (place) => {
    const found = cells ? readCell(chart, place.x, place.y) : null;
    if (found) showCell(found);
    else if (!cells && stops.length) showStop(findNearest(stops, place.x));
  };
  return { hide, move, standing, standAt };
}
