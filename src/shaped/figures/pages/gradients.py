"""Gradients: beyond the paper, the exact law of the query gradients by layer, against autograd and against independent backward weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call

from shaped.compare import measure_distances
from shaped.covariance import equicorrelated
from shaped.engine import draw_start
from shaped.figures.harness.claims import Row, bootstrap_interval, judge, judge_agreement, judge_separation
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared.ensembles import make_models
from shaped.gradients import backpropagate
from shaped.layers import Layer, ShapedAttention, ShapedFeedForward
from shaped.nn.networks import RandomAttention
from shaped.randomness import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The law of the gradients"
SHOWS = (
    "Beyond the paper: left, norm of the gradient of a squared error with respect to the query weights of each layer; median over random "
    "networks. Lines: the exact law, drawn without weights, with the 5 % and 95 % quantiles of the shaped one; dots: autograd through "
    "explicit weights; dashed: the usual assumption of independent weights in the backward pass. Right: Kolmogorov-Smirnov distance "
    "of the two laws from autograd; two samples of one law lie in the grey area in 95 % of cases."
)
MODELS = ("shaped", "qk_norm", "unshaped", "preln", "postln")
TITLES = {"shaped": "shaped", "qk_norm": "shaped, QK-norm", "unshaped": "unshaped", "preln": "Pre-LN", "postln": "Post-LN"}
SHAPED = MODELS[:2]
FACES = ("exact", "autograd", "independent")
OUTPUTS = 5

STEADY = 20.0  # the factor within which fig2 has shaped gradients stay over the layers
RESAMPLES = 200
AT_ONCE = 2**9  # networks with explicit weights


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Small networks, of which autograd can differentiate enough to prove that laws agree."""

    n: int = 16
    d: int = 32
    gamma: float = 0.5
    rho: float = 0.2
    samples: int = 3 * 2**14


SCALES = {"quick": Settings(samples=2**8), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def make_layers(gamma: float) -> dict[str, Layer]:
    return make_models(gamma) | {"qk_norm": ShapedAttention(gamma, qk_norm=True) >> ShapedFeedForward(gamma)}


def find_squared_error(outputs: Float[Tensor, "batch m k"]) -> Float[Tensor, " batch"]:
    return outputs.square().sum((-2, -1)) / 2


Logarithms = Float[np.ndarray, "layer network"]


def simulate(settings: Settings, name: str, face: str, m: int, seed: int, device: str) -> Logarithms:
    """log10 of the norm of dloss/dW^Q of every layer of random networks, those whose tokens stay in the range of floats.

    Independent weights are a quarter of the networks: they are not close to the others.
    """
    layer, V0 = make_layers(settings.gamma)[name], equicorrelated(m, settings.rho)
    if face == "autograd":
        squares = differentiate(layer, V0, settings, seed, device)
    else:
        samples = settings.samples if face == "exact" else max(2, settings.samples // 4)
        sizes = {"n": settings.n, "d": settings.d, "outputs": OUTPUTS, "samples": samples, "seed": seed, "device": device}
        how: dict[str, Any] = {"loss": find_squared_error, "independent": face == "independent", "progress": False}
        squares = backpropagate(layer, V0, **sizes, **how).weights["query"]
    kept = squares[:, squares.isfinite().all(0)].clamp(min=1e-300)
    return (kept.log10() / 2).cpu().numpy()


def differentiate(layer: Layer, V0: Tensor, settings: Settings, seed: int, device: str) -> Float[Tensor, "layer network"]:
    """The squared norms by autograd, through explicit weights."""
    module = layer.module(settings.n, dtype=torch.float64).to(device).requires_grad_(False)
    (attention,) = (path for path, part in module.named_modules() if isinstance(part, RandomAttention))
    found = []
    for block, first in enumerate(range(0, settings.samples, AT_ONCE)):
        stream = Stream(seed, block, kind="explicit gradients", dtype=torch.float64, device=torch.device(device))
        batch = min(AT_ONCE, settings.samples - first)
        X = draw_start(V0.to(device).expand(batch, -1, -1), settings.n, stream)
        queries = []
        for _ in range(settings.d):
            weights = {path: stream.normal(batch, *weight.shape) for path, weight in module.named_parameters()}
            queries.append(weights[f"{attention}.query"].requires_grad_())
            X = functional_call(module, weights, (X,))
        loss = find_squared_error(X @ stream.normal(batch, settings.n, OUTPUTS) / settings.n**0.5)
        gradients = torch.autograd.grad(loss.sum(), queries)
        found.append(torch.stack([gradient.square().sum((-2, -1)) for gradient in gradients]))
    return torch.cat(found, 1)


def compute(settings: Settings, simulator: Simulator) -> Result:
    m, seed = simulator.tokens, simulator.seed
    found = simulator.run(
        {
            (name, face): partial(simulate, settings, name, face, m, seed + (face == "autograd"), simulator.device)
            for face in ("autograd", "exact", "independent")  # the longest first
            for name in MODELS
        }
    )
    claims: list[Row] = []
    arrays: dict[str, np.ndarray] = {"layer": np.arange(1, settings.d + 1), "bands": np.zeros((2, settings.d))}
    for name in MODELS:
        laws = {face: found[name, face] for face in FACES}
        for face, logs in laws.items():
            arrays[f"median_{name}_{face}"] = 10.0 ** np.median(logs, 1)
        arrays[f"quantiles_{name}"] = 10.0 ** np.quantile(laws["exact"], [0.05, 0.95], axis=1)
        claims += judge_gradients(name, m, laws, seed)
        for place, face in enumerate(("exact", "independent")):
            distances = [measure_distance(laws["autograd"][layer], laws[face][layer]) for layer in range(settings.d)]
            arrays[f"distance_{name}_{face}"] = np.array(distances)
            arrays["bands"][place] = find_band(laws["autograd"].shape[1], laws[face].shape[1])
    return Result(arrays, claims)


def judge_gradients(name: str, m: int, laws: dict[str, Logarithms], seed: int) -> list[Row]:
    title, id = TITLES[name], f"gradients.{name.replace('_', '-')}"

    def distance(face: str) -> Any:
        rng = np.random.default_rng(seed)
        return measure_distances(laws["autograd"][0][:, None], laws[face][0][:, None], RESAMPLES, rng)[0]

    of = "Kolmogorov-Smirnov distance of the first layer's query gradients from autograd's"
    rows = [judge_agreement(f"{id}.law", m, f"{title}: the law is exact; {of}", distance("exact"))]
    if name in SHAPED:
        claim = f"{title}: independent backward weights have another law; {of}"
        rows.append(judge_separation(f"{id}.independent", m, claim, distance("independent")))
    ends = laws["exact"][[0, -1]].T
    fall, (low, high) = bootstrap_interval(ends, lambda both: float(np.subtract(*np.median(both, 0))), seed)
    words = "median norm at the first layer over that at the last"
    if name in SHAPED:
        claim = f"{title}: gradients neither vanish nor explode; {words}, or its inverse"
        worst = max(fall, -fall), (max(low, -high, 0.0), max(high, -low))
        rows.append(judge(f"{id}.steady", m, claim, 10.0 ** worst[0], (10.0 ** worst[1][0], 10.0 ** worst[1][1]), at_most=STEADY))
    elif name != "preln":
        claim = f"{title}: gradients vanish; {words}"
        rows.append(judge(f"{id}.vanish", m, claim, 10.0**fall, (10.0**low, 10.0**high), at_least=STEADY))
    return rows


def measure_distance(one: Float[np.ndarray, " sample"], other: Float[np.ndarray, " sample"]) -> float:
    """Kolmogorov-Smirnov."""
    at = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def find_band(one: int, other: int) -> float:
    """The 95 % quantile of the distance of two samples of one law (Smirnov 1948)."""
    return 1.3581 * (1 / one + 1 / other) ** 0.5


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from matplotlib.lines import Line2D

    from shaped.figures.harness.style import BLACK, COLOURS, GREY, SKY, make_panels

    colours = COLOURS | {"qk_norm": SKY}
    figure, (norms, distances) = make_panels(2)
    layer = arrays["layer"]
    for name in MODELS:
        norms.plot(layer, arrays[f"median_{name}_exact"], color=colours[name], label=TITLES[name])
        dots = {"linestyle": "none", "marker": "o", "markersize": 2.5, "markevery": (1, 3)}
        norms.plot(layer, arrays[f"median_{name}_autograd"], color=colours[name], **dots)
        norms.plot(layer, arrays[f"median_{name}_independent"], "--", color=colours[name], linewidth=0.9)
        for face, line in (("exact", "-"), ("independent", "--")):
            distances.plot(layer, arrays[f"distance_{name}_{face}"], line, color=colours[name], linewidth=1.0)
    norms.fill_between(layer, *arrays["quantiles_shaped"], color=colours["shaped"], alpha=0.15, linewidth=0)
    distances.fill_between(layer, 0.0, arrays["bands"][0], color=GREY, alpha=0.35, linewidth=0)
    norms.set(xlabel=r"layer $\ell$", ylabel=r"$\Vert\partial\mathcal{L}/\partial W^Q_\ell\Vert$", yscale="log", xlim=(1, layer[-1]))
    distances.set(xlabel=r"layer $\ell$", ylabel="distance from autograd", xlim=(1, layer[-1]), ylim=(0, None))
    kinds = [("exact law", {"linestyle": "-"}), ("autograd", {"linestyle": "none", "marker": "o", "markersize": 2.5})]
    kinds.append(("independent weights", {"linestyle": "--", "linewidth": 0.9}))
    norms.legend(handles=[Line2D([], [], color=BLACK, label=label, **how) for label, how in kinds], loc="lower left")
    figure.legend(handles=norms.get_legend_handles_labels()[0], loc="outside upper center", ncols=5)
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    ends = ", ".join(
        f"{TITLES[name]} from {arrays[f'median_{name}_exact'][0]:.2g} to {arrays[f'median_{name}_exact'][-1]:.2g}" for name in MODELS
    )
    exact, other = (max(arrays[f"distance_{name}_{face}"].max() for name in MODELS) for face in ("exact", "independent"))
    return (
        f"Left: medians of the gradient norm from layer 1 to {arrays['layer'][-1]:.0f}, with autograd's dots: {ends}. Right: the exact "
        f"law's distance from autograd is at most {exact:.2g}, that of independent weights reaches {other:.2g}; the grey area ends at "
        f"{arrays['bands'][0, 0]:.2g}."
    )
