"""Curves over the layers as SVG: one curve with its band, the gradients of all matrices, and a strip of all heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shaped.diagnosis.page.axes import HEIGHT, LEFT, RIGHT, WIDTH, Axis, choose_axis, draw_axis, draw_layers, place_stage, vary_much
from shaped.diagnosis.page.text import show_share
from shaped.html.text import show, to_html

Values = list[float | None]
LINES = 12
"""Matrices that are drawn at most; all are in the JSON file."""
COLOURS = 8
CELLS = 3000
"""Of a strip at most. With more, quantiles of the heads are shown."""
QUANTILES = {"smallest": 0.0, "first quartile": 0.25, "median": 0.5, "third quartile": 0.75, "largest": 1.0}


def draw_curve(
    name: str,
    about: str,
    values: Values,
    depth: int,
    *,
    band: Mapping[str, Values] | None = None,
    threshold: float | None = None,
    flagged: Iterable[int] = (),
    may_be_logarithmic: bool = False,
    within: tuple[float, float] | None = None,
) -> str:
    """A figure. Values are those of the last stages: of all, or of all but the one before the first layer.

    Args:
        band: low, mean and high at initialisation, for the same stages.
        threshold: of the rule, drawn where the axis reaches it.
        flagged: stages beyond the threshold.
        may_be_logarithmic: if the values differ by a factor of 10.
        within: an interval that the axis holds.
    """
    first = depth + 1 - len(values)
    drawn = [*values, *(end for side in ("low", "high") for end in (band or {}).get(side, []))]
    axis = choose_axis(drawn, may_be_logarithmic and vary_much(drawn), within)
    about += ", logarithmic" if axis.logarithmic else ""
    content = draw_axis(axis) + draw_layers(depth)
    if band:
        low, mean, high = ([(first + i, y) for i, y in enumerate(band[side]) if y is not None] for side in ("low", "mean", "high"))
        content += f'<polygon class="band" points="{join(low, depth, axis)} {join(reversed(high), depth, axis)}"/>'
        content += f'<polyline class="mean" points="{join(mean, depth, axis)}"/>'
    if threshold is not None and axis.low <= threshold <= axis.high:
        y, title = axis.place(threshold), f"<title>threshold {show(threshold)}</title>"
        content += f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}">{title}</line>'
    content += draw_line(values, first, depth, axis, "curve")
    flags, number = set(flagged), show_share if within else show
    for stage, value in enumerate(values, first):
        if value is not None:
            place = f'cx="{place_stage(stage, depth):.1f}" cy="{axis.place(value):.1f}"'
            kind = "dot flag" if stage in flags else "dot"
            ends = f", band {number(band['low'][stage - first])} to {number(band['high'][stage - first])}" if band else ""
            title = f"{'before the first layer' if stage == 0 else f'layer {stage}'}: {number(value)}{ends}"
            content += f'<g><circle class="{kind}" {place} r="{2.5 if depth <= 48 else 1.5}"/>'
            content += f'<circle class="reach" {place} r="8"><title>{to_html(title)}</title></circle></g>'
    return make_figure(name, about, describe_curve(name, values, first, band, number), content)


def draw_gradients(name: str, about: str, layers: list[dict[str, Any]]) -> str:
    """One line a weight matrix, on a logarithmic axis."""
    counts: dict[str, int] = {}
    for layer in layers:
        for matrix in layer["gradients"]:
            counts[matrix] = counts.get(matrix, 0) + 1
    names = sorted(counts, key=lambda matrix: -counts[matrix])[:LINES]
    lines: dict[str, Values] = {matrix: [layer["gradients"].get(matrix) for layer in layers] for matrix in names}
    axis, depth = choose_axis((value for values in lines.values() for value in values), logarithmic=True), len(layers)
    content, legend = draw_axis(axis) + draw_layers(depth), ""
    for number, (matrix, values) in enumerate(lines.items()):
        kind = f"line k{number % COLOURS}" + (" second" if number >= COLOURS else "")
        content += draw_line(values, 1, depth, axis, kind)
        for stage, value in enumerate(values, 1):
            if value is not None:
                place = f'cx="{place_stage(stage, depth):.1f}" cy="{axis.place(value):.1f}"'
                content += (
                    f'<circle class="reach" {place} r="4"><title>{to_html(f"{matrix}, layer {stage}: {show(value)}")}</title></circle>'
                )
        mark = f'<svg viewBox="0 0 20 8" aria-hidden="true"><line class="{kind}" x1="0" x2="20" y1="4" y2="4"/></svg>'
        legend += f"<li>{mark}{to_html(matrix)}</li>"
    left_out = f" {len(counts) - len(names)} more are in the JSON file." if len(counts) > len(names) else ""
    ends = "; ".join(f"{matrix} {show(values[0])} in the first layer, {show(values[-1])} in the last" for matrix, values in lines.items())
    label = f"{name} over {depth} layers: {ends}" if lines else f"{name}: there are none"
    return make_figure(name, about + left_out, label, content, f'<ul class="legend">{legend}</ul>')


def draw_heads(name: str, about: str, shares: list[list[float | None]], entropies: list[list[float | None]]) -> str:
    """A strip: a column a layer, a row a head; the fuller the colour, the larger is the share of the uniform entropy."""
    depth, rows = len(shares), max(map(len, shares), default=0)
    labels = [f"head {row + 1}" for row in range(rows)]
    if depth * rows > CELLS:
        shares, entropies = ([take_quantiles(values) for values in layers] for layers in (shares, entropies))
        labels, rows = list(QUANTILES), len(QUANTILES)
        about += " Of many heads, five quantiles."
    height = max(60.0, min(HEIGHT, 34.0 + 14.0 * rows))
    wide, tall = (WIDTH - LEFT - RIGHT) / max(depth, 1), (height - 34.0) / max(rows, 1)
    content = ""
    for column, (values, nats) in enumerate(zip(shares, entropies, strict=True)):
        for row, (share, entropy) in enumerate(zip(values, nats, strict=True)):
            place = f'x="{LEFT + column * wide:.1f}" y="{6.0 + row * tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
            title = to_html(f"layer {column + 1}, {labels[row]}: {show(entropy)} nats, {show_share(share)} of the uniform entropy")
            look = 'class="empty"' if share is None else f'class="cell" fill-opacity="{0.06 + 0.94 * min(1.0, max(0.0, share)):.2f}"'
            content += f"<rect {look} {place}><title>{title}</title></rect>"
    content += f'<text x="{LEFT - 5}" y="16" text-anchor="end">1</text>' if rows else ""
    content += f'<text x="{LEFT - 5}" y="{height - 30.0:.1f}" text-anchor="end">{rows}</text>' if rows > 2 else ""
    content += f'<text x="{LEFT + wide / 2:.1f}" y="{height - 14:.1f}" text-anchor="middle">1</text>'
    content += f'<text x="{WIDTH - RIGHT:.1f}" y="{height - 14:.1f}" text-anchor="end">layer {depth}</text>'
    known = [share for values in shares for share in values if share is not None]
    seen = f"from {show_share(min(known))} to {show_share(max(known))} of the uniform entropy" if known else "nothing was measured"
    return make_figure(name, about, f"{name}: {depth} layers, {rows} rows, {seen}", content, height=height)


def take_quantiles(values: list[float | None]) -> list[float | None]:
    known = sorted(value for value in values if value is not None)
    return [known[round(share * (len(known) - 1))] if known else None for share in QUANTILES.values()]


def draw_line(values: Values, first: int, depth: int, axis: Axis, kind: str) -> str:
    """Polylines, one for each run of values that are known."""
    runs: list[list[tuple[int, float]]] = [[]]
    for stage, value in enumerate(values, first):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((stage, value))
    return "".join(f'<polyline class="{kind}" points="{join(run, depth, axis)}"/>' for run in runs if run)


def join(points: Iterable[tuple[int, float]], depth: int, axis: Axis) -> str:
    return " ".join(f"{place_stage(stage, depth):.1f},{axis.place(value):.1f}" for stage, value in points)


def describe_curve(name: str, values: Values, first: int, band: Mapping[str, Values] | None, number: Callable[[float | None], str]) -> str:
    """What is seen, for readers who do not see it."""
    known = [(stage, value) for stage, value in enumerate(values, first) if value is not None]
    if not known:
        return f"{name}: nothing was measured"
    top, foot = max(known, key=lambda one: one[1]), min(known, key=lambda one: one[1])
    said = f"{name} over the layers: {number(known[0][1])} at layer {known[0][0]}, {number(known[-1][1])} at layer {known[-1][0]}"
    said += f"; largest {number(top[1])} at layer {top[0]}, smallest {number(foot[1])} at layer {foot[0]}"
    return said + (f"; at initialisation {number(band['low'][-1])} to {number(band['high'][-1])} at the last layer" if band else "")


def make_figure(name: str, about: str, label: str, content: str, below: str = "", height: float = HEIGHT) -> str:
    return (
        f'<figure><figcaption>{to_html(name)} <span class="soft">{to_html(about)}</span></figcaption>\n'
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{to_html(label)}">{content}</svg>{below}</figure>\n'
    )
