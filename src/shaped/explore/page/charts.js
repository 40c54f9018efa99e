// Draws a chart of the server as SVG. It knows scales, series and roles, and nothing of what they mean.

import { makeScale, makeTicks, measureText, withNear } from "./axes.js";
import { drawColourBar, drawSeries, drawSwatch, listValues } from "./marks.js";
import { add } from "./svg.js";

const ROW = 15; // of the legend
const LETTERS = 11; // pixels
const UNDER = ["cells", "band", "steps", "paths", "line", "rule", "point"]; // from the bottom to the top
let count = 0;

/** One entry a role: a line, its band and its paths share it, under the line's name up to the first comma. */
function listEntries(chart) {
  const entries = [];
  for (const series of chart.series) {
    if (series.kind === "rule" || series.kind === "cells" || !series.name) continue; // a rule carries its name, cells have a bar
    const shared = entries.find(({ role, kinds }) => role === series.role && !kinds.has(series.kind) && series.kind !== "point");
    const entry = shared ?? { role: series.role, kinds: new Map(), name: series.name };
    entry.kinds.set(series.kind, series);
    const [leading] = ["line", "steps", "band", "paths"].filter((kind) => entry.kinds.has(kind));
    if (shared) entry.name = entry.kinds.get(leading).name.split(", ")[0];
    else entries.push(entry);
  }
  const cells = chart.series.find((series) => series.kind === "cells" && series.outlined?.flat().some(Boolean));
  if (cells) entries.push({ name: cells.outline ?? "outlined", kinds: new Map([["outline", cells]]) });
  // "a, median" and "b, median" are "a" and "b": what all have in common tells nothing apart.
  const alone = entries.filter(({ kinds }) => kinds.size === 1);
  const ending = alone[0]?.name.match(/, .*/)?.[0];
  if (entries.length > 1 && ending && alone.every(({ name }) => name.endsWith(ending))) {
    for (const entry of alone) entry.name = entry.name.slice(0, -ending.length);
  }
  return entries;
}

/** Rows of entries that fit into the width. */
function layOutLegend(chart, width) {
  const rows = [];
  let left = Infinity;
  for (const entry of listEntries(chart)) {
    const taken = 20 + measureText(entry.name, LETTERS) + 12;
    if (left + taken - 12 > width) {
      rows.push([]);
      left = 0;
    }
    rows.at(-1).push({ ...entry, left });
    left += taken;
  }
  return rows;
}

function drawAxes(layer, chart, x, y) {
  const sides = {
    x: makeTicks(x, (label) => measureText(label, LETTERS), 8),
    y: makeTicks(y, () => 11, 7),
  };
  const cells = chart.series.some((series) => series.kind === "cells");
  for (const { value, label } of sides.y.ticks) {
    if (!cells) add(layer, "line", { x1: x.start, x2: x.end, y1: y(value), y2: y(value), class: "grid-line" });
    add(layer, "line", { x1: x.start - 4, x2: x.start, y1: y(value), y2: y(value), class: "axis" });
    add(layer, "text", { x: x.start - 6, y: y(value) + 4, class: "tick end" }, label);
  }
  for (const value of sides.y.minor) add(layer, "line", { x1: x.start - 2.5, x2: x.start, y1: y(value), y2: y(value), class: "axis" });
  for (const { value, label } of sides.x.ticks) {
    add(layer, "line", { x1: x(value), x2: x(value), y1: y.start, y2: y.start + 4, class: "axis" });
    add(layer, "text", { x: x(value), y: y.start + 15, class: "tick middle" }, label);
  }
  for (const value of sides.x.minor) add(layer, "line", { x1: x(value), x2: x(value), y1: y.start, y2: y.start + 2.5, class: "axis" });
  add(layer, "path", { d: `M${x.start} ${y.end}V${y.start}H${x.end}`, class: "axis" });
}

/** The chart as an SVG element of this size, with its two scales for whoever reads it by pointer or key. */
export function drawChart(chart, width, height) {
  const svg = add(null, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart", role: "img", "aria-label": chart.about });
  const legend = layOutLegend(chart, width);
  const cells = chart.series.find((series) => series.kind === "cells");
  const top = legend.length * ROW + 22;
  const bottom = height - 32 - (cells ? 40 : 0);
  const [xs, ys] = ["x", "y"].map((axis) => chart.series.flatMap((series) => listValues(series, axis)));
  const rules = ["x", "y"].map((axis) => chart.series.flatMap((series) => (series.kind === "rule" && axis in series ? [series[axis]] : [])));
  const y = makeScale(chart.y, withNear(ys, rules[1], chart.y), bottom, top);
  const widest = Math.max(...makeTicks(y, () => 11, 7).ticks.map(({ label }) => measureText(label, LETTERS)));
  const widths = withNear(xs, rules[0], chart.x);
  const rough = makeScale(chart.x, widths, 0, 1);
  const last = makeTicks(rough, () => 0, 0).ticks.at(-1)?.label ?? "";
  const x = makeScale(chart.x, widths, Math.ceil(widest) + 9, width - Math.max(6, Math.ceil(measureText(last, LETTERS) / 2) + 2));

  const clip = `clip-${(count += 1)}`;
  add(add(svg, "clipPath", { id: clip }), "rect", { x: x.start, y: y.end - 2, width: x.end - x.start + 2, height: y.start - y.end + 4 });
  legend.forEach((row, index) =>
    row.forEach(({ kinds, name, left }) => {
      for (const [kind, series] of kinds) drawSwatch(svg, kind, series.role, left, index * ROW + 7);
      add(svg, "text", { x: left + 20, y: index * ROW + 11, class: "legend" }, name);
    }),
  );
  add(svg, "text", { x: 0, y: top - 8, class: "axis-label" }, chart.y.label);
  add(svg, "text", { x: x.end, y: bottom + 28, class: "axis-label end" }, chart.x.label);
  drawAxes(svg, chart, x, y);
  const layer = add(svg, "g", { "clip-path": `url(#${clip})` });
  const labels = add(svg, "g");
  for (const kind of UNDER) for (const series of chart.series) if (series.kind === kind) drawSeries(layer, series, { x, y }, labels);
  if (cells) drawColourBar(svg, cells, { x: x.start, y: height - 22, width: x.end - x.start });
  return { svg, x, y };
}
