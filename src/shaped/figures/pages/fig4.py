"""Figure 4: the covariance through depth when some of the three modifications of attention are left out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shaped.figures.harness.claims import bootstrap_interval, judge, mean_interval, share_interval
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared.ensembles import Ensemble, make_ensemble, simulate_mean_pairs
from shaped.layers import ShapedAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Each of the three modifications is needed"
SHOWS = (
    "Attention alone, with every combination of the three modifications that shape it: identity (id), centring (centre), temperature "
    "(τ² = n·n_k in place of n_k). Mean absolute correlation and covariance against depth; on the right the covariance near its start, "
    "enlarged. As in the paper, the combinations whose covariance explodes for lack of centring are left out on the left. But for the "
    "shaped one, combinations that differ only in their temperature lie nearly on each other: one is broad and pale, the other dashed. "
    "Of the shaped networks a few in a thousand explode and carry the mean, so their median is drawn too (dotted)."
)

Switches = tuple[bool, bool, bool]  # identity, centring, temperature
COMBINATIONS: dict[str, Switches] = {
    "+".join(part for part, present in zip(("id", "centre", "tau"), on, strict=True) if present) or "none": on
    for on in product((True, False), (True, False), (True, False))
}
SHAPED = "id+centre+tau"

# Orders of magnitude of the mean |V| at the last layer, between what the notes on Fig. 4 give and 1, where the shaped network stays.
VANISHED = -20.0  # log10; tau+centre without id: 1e-46
EXPLODED = 20.0  # log10; id without centre: 1e59
UNSTABLE = 3.0  # log10; id+centre with tau = sqrt(n_k): 1e11
STABLE = 1.0  # |log10|; shaped: 0.57
# The next two, and the median, were added after the first run, in which a few networks determined the mean.
FEW = 0.01  # share of shaped networks with |V| above EXPLODING
EXPLODING = 1e2
TAIL = "a few networks in a thousand explode (the drift is cubic), and the mean is theirs: orders of magnitude apart from seed to seed"
SIZE = "log10 of mean |V|"
ALIGNED = 0.99  # mean |rho| for tau alone, and for none: tends to 1
NEARLY = 0.7  # id+centre: 0.87
APART = 0.7  # shaped: 0.44
NEAR = (0.1, 1.0)  # the covariances that are drawn enlarged


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fig. interventions."""

    n: int = 300
    d: int = 150
    gamma: float = 2**-0.5
    rho: float = 0.2
    samples: int = 2**13


SCALES = {"quick": Settings(samples=2**10), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def compute(settings: Settings, simulator: Simulator) -> Result:
    def ensemble(on: Switches, m: int) -> Ensemble:
        layer = ShapedAttention(settings.gamma, identity=on[0], centre=on[1], temperature=on[2])
        return make_ensemble(settings, layer, m, simulator, record=3, upper=None)

    found = simulator.run(
        {
            (m, name): partial(simulate_mean_pairs, ensemble(on, m), ("rho", "V"), True)
            for m in simulator.token_counts
            for name, on in COMBINATIONS.items()
        }
    )
    claims, table = [], []
    for m in simulator.token_counts:
        rho = {name: mean_interval(found[m, name]["rho"][-1]) for name in COMBINATIONS}
        size = {name: bootstrap_interval(found[m, name]["V"][-1], log_mean, simulator.seed) for name in COMBINATIONS}
        shaped = found[m, SHAPED]["V"][-1]
        typical = bootstrap_interval(np.log10(shaped), lambda drawn: float(np.median(drawn)), simulator.seed)
        exploding = share_interval(shaped > EXPLODING)
        claims += [
            judge("fig4.shaped.above", m, f"shaped: the covariance does not vanish; {SIZE}", *size[SHAPED], at_least=-STABLE),
            judge("fig4.shaped.below", m, f"shaped: nor does it explode; {SIZE}", *size[SHAPED], at_most=STABLE, why=TAIL),
            judge(
                "fig4.shaped.median.above",
                m,
                "shaped: the typical covariance does not vanish; log10 of median |V|",
                *typical,
                at_least=-STABLE,
            ),
            judge("fig4.shaped.median.below", m, "shaped: nor does it explode; log10 of median |V|", *typical, at_most=STABLE),
            judge("fig4.shaped.tail", m, "shaped: few networks explode; share with |V| above 100", *exploding, at_most=FEW),
            judge("fig4.shaped.rho", m, "shaped: tokens do not align; mean |ρ|", *rho[SHAPED], at_most=APART),
            judge("fig4.id+centre.unstable", m, f"id+centre: the covariance is unstable; {SIZE}", *size["id+centre"], at_least=UNSTABLE),
            judge("fig4.id+centre.rho", m, "id+centre: tokens nearly align; mean |ρ|", *rho["id+centre"], at_least=NEARLY),
        ]
        for name in ("centre+tau", "centre"):
            claims.append(judge(f"fig4.{name}.vanishes", m, f"{name}: the covariance vanishes; {SIZE}", *size[name], at_most=VANISHED))
        for name in ("id+tau", "id"):
            claims.append(judge(f"fig4.{name}.explodes", m, f"{name}: the covariance explodes; {SIZE}", *size[name], at_least=EXPLODED))
        for name in ("tau", "none"):
            claims.append(judge(f"fig4.{name}.aligns", m, f"{name}: tokens align; mean |ρ|", *rho[name], at_least=ALIGNED))
        if m == simulator.tokens:
            table = [[name, rho[name][0], 10.0 ** size[name][0]] for name in COMBINATIONS]
    arrays = {"layer": found[simulator.tokens, SHAPED]["layer"]}
    for name in COMBINATIONS:
        arrays[f"rho_{name}"] = found[simulator.tokens, name]["rho"].mean(1)
        arrays[f"V_{name}"] = found[simulator.tokens, name]["V"].mean(1)
    arrays["V_median"] = np.median(found[simulator.tokens, SHAPED]["V"], 1)
    columns = ["modifications", "mean |ρ| at the last layer", "mean |V| at the last layer"]
    return Result(arrays, claims, {"columns": columns, "rows": table})


def log_mean(values: np.ndarray) -> float:
    return float(np.log10(max(values.mean(), 1e-300)))


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, make_panels

    colours = dict(zip(COMBINATIONS, (BLUE, ORANGE, GREEN, SKY, PURPLE, BLACK, GREY, VERMILION), strict=True))
    figure, panels = make_panels(3, height=3.1)
    for axes, quantity, left_out in zip(panels, ("rho", "V", "V"), (("id+tau", "id"), (), ()), strict=True):
        for name, colour in colours.items():
            if name not in left_out:
                axes.plot(arrays["layer"], arrays[f"{quantity}_{name}"], color=colour, label=label_of(name), **choose_line(name))
        axes.set(xlabel=r"layer $\ell$", xlim=(0, arrays["layer"][-1]))
    for axes in panels[1:]:
        axes.plot(arrays["layer"], arrays["V_median"], ":", color=BLUE, linewidth=1.8, zorder=4, label="shaped, median")
        axes.set_yscale("log")
    panels[0].set(ylabel=r"mean of $|\rho^{\alpha\beta}_\ell|$", ylim=(0, 1.03))
    panels[1].set(ylabel=r"mean of $|V^{\alpha\beta}_\ell|$", yticks=[10.0**power for power in range(-40, 61, 20)])
    panels[1].minorticks_off()
    panels[2].set(ylabel="the same, enlarged", ylim=NEAR)
    ticks = (0.1, 0.2, 0.5, 1.0)
    panels[2].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[2].minorticks_off()
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def choose_line(name: str) -> dict[str, Any]:
    """But for the shaped one, combinations that differ only in their temperature lie on each other: one is broad and pale, the other thin
    and dashed on it."""
    if name == SHAPED:
        return {"linewidth": 2.0, "zorder": 3}
    if name == "id+centre":
        return {"linewidth": 1.3}
    return {"linewidth": 4.5, "alpha": 0.45} if name.endswith("tau") else {"linewidth": 1.2, "linestyle": "--"}


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    sizes = ", ".join(f"{describe_name(name)} {arrays[f'V_{name}'][-1]:.1g}" for name in COMBINATIONS)
    rho = ", ".join(f"{describe_name(name)} {arrays[f'rho_{name}'][-1]:.2g}" for name in COMBINATIONS if name not in ("id+tau", "id"))
    return (
        f"At layer {arrays['layer'][-1]:.0f}, left, mean absolute correlation: {rho}. Middle, mean absolute covariance on a logarithmic "
        f"axis: {sizes}. Right, the same enlarged near 1: the median of the shaped networks, dotted, ends at "
        f"{arrays['V_median'][-1]:.2g}. But for the shaped one, a curve with the temperature is broad, and "
        "the one without it dashed."
    )


def describe_name(name: str) -> str:
    return "shaped" if name == SHAPED else name


def label_of(name: str) -> str:
    if name == "none":
        return "none (softmax)"
    text = name.replace("tau", r"$\tau^2=nn_k$").replace("+", ", ")
    return f"{text} (shaped)" if name == SHAPED else text if "+" in name else f"only {text}"
