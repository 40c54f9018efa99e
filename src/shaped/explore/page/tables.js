// The numbers of a chart as tables: to read without the picture, and to copy.

import { formatNumber } from "./axes.js";

/** Columns of a series, beside its x; several series with the same x share a table. */
function listColumns(series) {
  switch (series.kind) {
    case "line":
      return [[series.name, series.y]];
    case "band":
      return [[`${series.name}, low`, series.low], [`${series.name}, high`, series.high]];
    case "paths":
      return series.ys.map((ys, index) => [`${series.name}, ${index + 1}`, ys]);
    default:
      return [];
  }
}

function tabulateCells(chart, series) {
  const span = (edges, index) => `${formatNumber(edges[index], 3)} to ${formatNumber(edges[index + 1], 3)}`;
  const head = [`${chart.y.label} ╲ ${chart.x.label}`, ...series.values[0].map((_, column) => span(series.x_edges, column))];
  const body = series.values.map((line, row) => [span(series.y_edges, row), ...line.map((value, column) => series.labels?.[row]?.[column] ?? value)]);
  return { name: series.name, head, body: body.reverse() };
}

/** Tables of {name, head, body}; numbers stay numbers. */
export function tabulate(chart) {
  const tables = [];
  const shared = new Map();
  const single = [];
  for (const series of chart.series) {
    if (series.kind === "cells") tables.push(tabulateCells(chart, series));
    else if (series.kind === "steps") {
      const body = series.heights.map((height, index) => [series.edges[index], series.edges[index + 1], height]);
      tables.push({ name: series.name, head: [`${chart.x.label}, from`, "to", chart.y.label], body });
    } else if (series.kind === "rule") single.push([series.name, series.x ?? null, series.y ?? null]);
    else if (series.kind === "point") single.push([series.name, series.x, series.y]);
    else {
      const key = series.x.join(" ");
      if (!shared.has(key)) shared.set(key, { name: "", head: [chart.x.label], body: series.x.map((value) => [value]) });
      const table = shared.get(key);
      for (const [name, values] of listColumns(series)) {
        table.head.push(name);
        values.forEach((value, index) => table.body[index].push(value));
      }
    }
  }
  tables.unshift(...shared.values());
  if (single.length) tables.push({ name: "", head: ["", chart.x.label, chart.y.label], body: single });
  return tables;
}

const show = (value) => (typeof value === "string" ? value : formatNumber(value, 5));

export function renderTables(chart) {
  return tabulate(chart).map(({ name, head, body }) => {
    const table = document.createElement("table");
    table.createCaption().textContent = name ? `${chart.title}: ${name}` : chart.title;
    const titles = table.createTHead().insertRow();
    for (const text of head) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = text;
      titles.append(cell);
    }
    const rows = table.createTBody();
    for (const line of body) {
      const row = rows.insertRow();
      for (const value of line) row.insertCell().textContent = show(value);
    }
    return table;
  });
}

/** Tab-separated, with all digits: what a spreadsheet takes from the clipboard. */
export function writeTabs(chart) {
  const line = (cells) => cells.map((cell) => (cell === null ? "" : String(cell).replace(/[\t\n]/g, " "))).join("\t");
  return tabulate(chart).map(({ head, body }) => [head, ...body].map(line).join("\n")).join("\n\n");
}
