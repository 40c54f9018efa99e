"""Output: beyond the paper's figures, the law of the network's output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from shaped.compare import measure_distances
from shaped.covariance import equicorrelated, factor
from shaped.figures.harness.claims import Row, judge_agreement, judge_separation
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared import laws
from shaped.figures.shared.density import joint_densities, pairs
from shaped.figures.shared.ensembles import EXPLODED, FACES, Ensemble, make_ensemble
from shaped.finite import TokenSteps
from shaped.layers.base import Sizes
from shaped.randomness import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "The output is N(0, V_T ⊗ I) with the SDE's V_T, not the Gaussian of infinite width"
SHOWS = (
    "Beyond the paper's figures: the output X_d W_out/√n of the shaped Transformer of Figure 1. Left: one entry. Right: the product of two "
    "tokens' entries. Network, drawn with its tokens, against N(0, V_T ⊗ I) with V_T from the SDE; grey: N(0, V_0 ⊗ I), the limit of "
    "infinite width at finite depth."
)
Output = Float[np.ndarray, "sample m output"]
RESAMPLES = 200
KS = "Kolmogorov-Smirnov distance of"


@dataclass(frozen=True, kw_only=True)
class Settings(laws.Settings):
    outputs: int = 4


SCALES = {"quick": Settings(samples=2**11), "paper": Settings(law_tokens=laws.PROVING)}


def settings(scale: str) -> Settings:
    return SCALES[scale]


def simulate_network_outputs(networks: Ensemble, outputs: int, block: int) -> Output:
    """Simulates networks with explicit tokens; returns X_d W_out/sqrt(n) of those that do not explode."""
    sizes, device = Sizes(networks.n), torch.device(networks.device)
    stream = Stream(networks.seed, block, kind="output", dtype=torch.float32, device=device)
    process = TokenSteps(networks.layer, sizes)
    X = process.start(networks.V0.to(device, torch.float32).expand(networks.samples, -1, -1), stream)
    for _ in range(networks.d):
        X, _ = process.step(X, stream)
    V = process.covariance(X)
    out = X @ stream.matrices(X, sizes.n, outputs) / sizes.n**0.5
    return out[V.diagonal(dim1=-2, dim2=-1).amax(-1) < EXPLODED].double().cpu().numpy()


def simulate_limit_outputs(limit: Ensemble, outputs: int) -> Output:
    """Simulates the SDE; returns one draw of N(0, V_T ⊗ I) for each path that did not stop."""
    paths = limit.simulate_limit()
    V = paths.V[-1].cpu()[paths.stopped > paths.t[-1]]
    return draw_gaussian(V, outputs, limit.seed)


def draw_gaussian(V: torch.Tensor, outputs: int, seed: int) -> Output:
    """N(0, V ⊗ I), one draw for each V."""
    normals = np.random.default_rng(seed).standard_normal((len(V), V.shape[-1], outputs))
    return factor(V).numpy() @ normals


def compute(settings: Settings, simulator: Simulator) -> Result:
    layer = laws.make_transformer(settings)
    jobs: dict[Any, Any] = {}
    for m in simulator.token_counts:
        whole = make_ensemble(settings, layer, m, simulator, step=settings.step, samples=settings.law_samples(m, simulator))
        blocks = split(whole)
        jobs |= {(m, "network", i): partial(simulate_network_outputs, part, settings.outputs, i) for i, part in enumerate(blocks)}
        jobs[m, "sde", 0] = partial(simulate_limit_outputs, whole, settings.outputs)
    found = simulator.run(jobs)
    claims, arrays = [], {}
    for m in simulator.token_counts:
        samples = {face: np.concatenate([out for (tokens, kind, _), out in found.items() if (tokens, kind) == (m, face)]) for face in FACES}
        V0 = equicorrelated(m, settings.rho).expand(len(samples["network"]), -1, -1)
        samples["wide"] = draw_gaussian(V0, settings.outputs, simulator.seed + 1)
        claims += judge_outputs(m, samples, simulator.seed)
        if m == simulator.tokens:
            arrays = joint_densities("entry", {name: entries(X).ravel() for name, X in samples.items()})
            arrays |= joint_densities("product", {name: products(X).ravel() for name, X in samples.items()})
    return Result(arrays, claims)


def split(whole: Ensemble, size: int = 256) -> list[Ensemble]:
    """The ensemble in pieces for several processes. The pieces do not depend on the number of processes, so the numbers do not either."""
    return [replace(whole, samples=min(size, whole.samples - first)) for first in range(0, whole.samples, size)]


def entries(X: Output) -> Float[np.ndarray, "sample number"]:
    return X.reshape(len(X), -1)


def products(X: Output) -> Float[np.ndarray, "sample number"]:
    """X^α X^β of every pair of tokens, for each entry of the output."""
    return pairs(np.einsum("sao,sbo->soab", X, X)).reshape(len(X), -1)


def judge_outputs(m: int, samples: dict[str, Output], seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    one, _ = measure_distances(entries(samples["network"]), entries(samples["sde"]), RESAMPLES, rng)
    two, _ = measure_distances(products(samples["network"]), products(samples["sde"]), RESAMPLES, rng)
    wide, _ = measure_distances(entries(samples["network"]), entries(samples["wide"]), RESAMPLES, rng)
    words = f"the output is N(0, V_T ⊗ I) with the SDE's V_T: {KS}"
    return [
        judge_agreement("output.entry", m, f"{words} an entry", one),
        judge_agreement("output.product", m, f"{words} the product of two tokens' entries", two),
        judge_separation("output.not-wide", m, f"it is not N(0, V_0 ⊗ I): {KS} an entry", wide),
    ]


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from shaped.figures.harness.style import GREY, draw_densities, make_panels, sort_densities

    figure, panels = make_panels(2, height=2.7)
    for axes, name, label in zip(
        panels,
        ("entry", "product"),
        (r"$X^{\alpha}_{\mathrm{out}}$", r"$X^{\alpha}_{\mathrm{out}}\,X^{\beta}_{\mathrm{out}}$"),
        strict=True,
    ):
        axes.plot(arrays[f"{name}_wide_grid"], arrays[f"{name}_wide_density"], "-.", color=GREY, label=r"$N(0, V_0 \otimes I)$")
        draw_densities(axes, arrays, name, label)
    panels[1].set(yscale="log", ylim=(2e-2, None), xlim=(-2.2, 3))
    figure.legend(handles=sort_densities(panels[0]), loc="outside upper center", ncols=5)
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    from shaped.figures.harness.style import describe_densities

    entry, wide = (arrays[f"entry_{name}_density"].max() for name in ("network", "wide"))
    return (
        f"Left, one entry: {describe_densities(arrays, 'entry', 'X')}; it is {entry:.2g} high, that of infinite width, grey, {wide:.2g}. "
        f"Right, the product of two tokens' entries on a logarithmic axis: {describe_densities(arrays, 'product', 'X·X')}."
    )
