"""diagnosis.html: verdicts, remedies, curves and tables in one file. Nothing in it runs, and no request leaves it."""

from __future__ import annotations

from typing import Any

from shaped.diagnosis.page.charts import draw_curve, draw_gradients, draw_heads
from shaped.diagnosis.page.style import STYLE
from shaped.diagnosis.page.text import show_share
from shaped.diagnosis.verdicts import NOTICES, RULES
from shaped.html.document import render_document
from shaped.html.text import render_table, show, to_html

CURVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "correlation": ("Correlation", "of pairs of tokens; 1: all are parallel", {"within": (0.0, 1.0)}),
    "rank": ("Effective rank", "of the tokens of a sequence", {}),
    "length": ("Length", "root mean square of the residual stream", {"may_be_logarithmic": True}),
    "kurtosis": ("Kurtosis", "of the features; 1: all are equally large", {"may_be_logarithmic": True}),
    "entropy": ("Entropy", "of attention in nats, mean over heads", {}),
    "largest_logit": ("Largest logit", "of all heads", {}),
    "gradient": ("Gradient", "norm over all matrices of the layer", {"may_be_logarithmic": True}),
    "dead": ("Dead units", "share of the activations' units", {"within": (0.0, 1.0)}),
}
"""Titles, what they mean, and options of the axis."""


def render_page(content: dict[str, Any]) -> str:
    """The page, from what `Diagnosis.to_json` returns."""
    info = content["info"]
    name = info.get("name") or info.get("model", "model")
    stacks = "".join(render_stack(stack, content) for stack in content["stacks"])
    body = f"{render_verdicts(name, content)}{stacks}{render_rules(content)}{render_facts(content)}"
    return render_document(f"{name}: diagnosis", STYLE, f"<main>\n{body}</main>")


def render_verdicts(name: str, content: dict[str, Any]) -> str:
    risk = content["risk"]
    kind = "bad" if risk >= 0.5 else "good"
    said = f"{len(content['verdicts'])} rule{'s' if len(content['verdicts']) != 1 else ''} beyond the threshold"
    cards = "".join(render_verdict(verdict, content) for verdict in content["verdicts"])
    remark = content["remark"]
    why = f"Risk {risk:.2f}: {remark}." if remark else "No rule found a risk."
    notices = f"{', '.join(NOTICES[:-1])} and {NOTICES[-1]}"
    none = f'<p class="card">{to_html(why)} The rules that came nearest are in the table below the curves.</p>\n'
    cards += none if remark or not cards else ""
    return (
        f'<h1>{to_html(name)}: <span class="{kind}">risk {risk:.2f}</span></h1>\n'
        f'<p class="soft">{to_html(said)}. Risk is 1/2 or more where a threshold is reached; {notices} do not count.</p>\n'
        f"{cards}"
    )


def render_verdict(verdict: dict[str, Any], content: dict[str, Any]) -> str:
    layers = verdict["layers"]
    where = f"{len(layers)} layers, {layers[0]} to {layers[-1]}" if len(layers) > 1 else next(iter(layers), "the model")
    facts = {
        "value": format_rule(verdict["name"], verdict["value"]),
        "threshold": format_rule(verdict["name"], verdict["threshold"]),
        "where": where,
        "source": verdict["source"],
    }
    listed = "".join(f"<li>{key} <b>{to_html(value)}</b></li>" for key, value in facts.items())
    tried = [trial for trial in content["remedies"] or () if (trial["verdict"], trial["stack"]) == (verdict["name"], verdict["stack"])]
    remedies = f'<ul class="remedies">{"".join(map(render_trial, tried))}</ul>' if tried else ""
    kind = "notice" if verdict["name"] in NOTICES else "verdict"
    return (
        f'<section class="card {kind}"><h3>{to_html(verdict["name"])}</h3>\n<p>{to_html(verdict["sentence"])}.</p>\n'
        f'<ul class="facts">{listed}</ul>{remedies}</section>\n'
    )


def render_trial(trial: dict[str, Any]) -> str:
    """A remedy with its numbers, and the line of code where it removes the verdict."""
    before, after = (format_rule(trial["verdict"], trial[when]) for when in ("before", "after"))
    numbers = "" if trial["problem"] else f": {to_html(trial['quantity'])} <b>{before} → {after}</b>"
    kind = "soft" if not trial["removed"] else "warn" if trial["appeared"] else "good"
    risk = f", risk {trial['risk']:.2f}" if trial["risk"] is not None else ""
    code = f"<br><code>{to_html(trial['code'])}</code>" if trial["removed"] else ""
    why = f'<br><span class="soft">{to_html(trial["reason"])}</span>' if trial["removed"] else ""
    return f'<li>{to_html(trial["remedy"])}{numbers}; <span class="{kind}">{to_html(trial["outcome"])}</span>{risk}{code}{why}</li>\n'


def render_stack(stack: str, content: dict[str, Any]) -> str:
    """The charts and the table of one stack."""
    curves, bands = content["stacks"][stack]["curves"], content["stacks"][stack]["bands"]
    layers = [row for row in content["layers"] if row["stack"] == stack]
    flags: dict[str, list[int]] = {}
    found = [(RULES[one["name"]], one["threshold"]) for one in content["findings"] if one["stack"] == stack]
    limits = {rule.curve: threshold for rule, threshold in found if rule.is_on_curve}
    for verdict in content["verdicts"]:
        if verdict["stack"] == stack:
            flags.setdefault(RULES[verdict["name"]].curve, []).extend(row["layer"] for row in layers if row["name"] in verdict["layers"])
    charts = []
    for name, (title, about, options) in CURVES.items():
        if any(value is not None for value in curves[name]):
            extra = {"band": bands.get(name), "threshold": limits.get(name), "flagged": flags.get(name, ())}
            charts.append(draw_curve(title, about, curves[name], len(layers), **extra, **options))
        if name == "entropy":
            charts.append(draw_heads("Entropy of each head", "full colour: as uniform attention", *list_heads(layers)))
        elif name == "gradient" and any(value is not None for row in layers for value in row["gradients"].values()):
            charts.append(draw_gradients("Gradient of each matrix", "norm, logarithmic.", layers))
    columns = ["layer", "name", *(title for title, _, _ in CURVES.values())]
    unseen = content["stacks"][stack]["unseen"]
    rows = [[row["layer"], row["name"], *(format_cell(name, row[name]) for name in CURVES)] for row in layers]
    return (
        f"<h2>{to_html(f'Layers: {stack}' if stack else 'Layers')}</h2>\n"
        f"{f'<p>{to_html(unseen)}.</p>' if unseen else ''}"
        f'<p class="soft">Shaded: the range at initialisation; dashed: its mean ({to_html(content["bands_source"])}). '
        "Dashed across: a threshold. Layers of a verdict are marked. Point at a place to see its number.</p>\n"
        f'<div class="charts">{"".join(charts)}</div>\n<h3>Numbers</h3>\n'
        f"{render_table(f'Numbers of each layer of {stack}', columns, rows, words=2, tall=True)}"
    )


def format_cell(name: str, value: float | None) -> str:
    """Empty where there is nothing to measure."""
    return "" if value is None else show_share(value) if "within" in CURVES[name][2] else show(value)


def format_rule(name: str, value: float | None) -> str:
    """Correlations and shares of the entropy may be close to 1."""
    return show_share(value) if RULES[name].curve in ("correlation", "entropy") else show(value)


def list_heads(layers: list[dict[str, Any]]) -> tuple[list[list[float | None]], list[list[float | None]]]:
    """Of each layer's heads: the share of the uniform entropy, and the entropy in nats."""
    shares, entropies = [], []
    for row in layers:
        # Each call has its own: the keys of cross-attention are not those of self-attention.
        pairs = [pair for call in row["heads"].values() for pair in zip(call["entropy"], call["uniform_entropy"], strict=True)]
        entropies.append([entropy for entropy, _ in pairs])
        shares.append([entropy / uniform if entropy is not None and uniform else None for entropy, uniform in pairs])
    return shares, entropies


def render_rules(content: dict[str, Any]) -> str:
    """All rules, also those on the right side of their threshold."""
    rows = []
    for one in content["findings"]:
        numbers = (format_rule(one["name"], one["value"]), format_rule(one["name"], one["threshold"]), show(one["decades"]))
        rows.append([one["name"], one["stack"] or "the model", "beyond" if one["decades"] >= 0.0 else "passes", *numbers])
    columns = ["rule", "stack", "", "value", "threshold", "decades beyond"]
    return f"<h2>All rules</h2>\n{render_table('All rules', columns, rows, words=3)}"


def render_facts(content: dict[str, Any]) -> str:
    info, loss = content["info"], content["loss"]
    facts = [
        f"{info.get('model', 'model')}, {info.get('parameters', 0):,} parameters",
        f"batch: {info.get('batch', '')}" + (f" ({info['about']})" if info.get("about") else ""),
        f"gradients of {loss['kind']}, {show(loss['value'])}",
        f"band: {content['bands_source']}; seed {info.get('seed', 0)}",
    ]
    if content["remedies"] is not None:
        facts.append(
            "remedies: measured with the same batch and weights; they say what a change does to this pass, not how the model trains"
        )
    return f'<h2>What was measured</h2>\n<ul class="soft">{"".join(f"<li>{to_html(fact)}</li>" for fact in facts)}</ul>\n'
