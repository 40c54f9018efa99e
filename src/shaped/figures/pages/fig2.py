"""Figure 2: gradients of value and query weights by layer, for next-token prediction on Python source."""

from __future__ import annotations

import math
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from shaped.figures.harness.claims import Row, judge, mean_interval
from shaped.figures.harness.page import Result
from shaped.figures.harness.simulator import Simulator
from shaped.figures.shared.ensembles import make_models
from shaped.gradients.chain import backpropagate_chain
from shaped.gradients.network import WeightlessLayer
from shaped.gradients.products import Products, Tokens, draw_normals
from shaped.layers import Sizes
from shaped.nn.functional import layer_norm
from shaped.nn.networks import RandomAttention
from shaped.randomness import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Shaping keeps gradients from vanishing"
SHOWS = (
    "Norm of the loss's gradient with respect to the value weights (left) and the query weights (right) of each layer, at initialisation. "
    "Causal attention, the architectures of Figure 1 and Post-LN; next-token prediction, byte by byte, on the source of the running "
    "Python's standard library. Solid: autograd through random networks, mean of the logarithm with its 95 % interval. Dashed: the same "
    "mean in the exact law of the gradients, drawn without weights, with its 5 % and 95 % quantiles as a band."
)
MODELS = ("shaped", "unshaped", "preln", "postln")
WEIGHTS = ("value", "query")
BYTES = 256

STEADY = 20.0  # shaped value and query gradients, and Post-LN value gradients, stay within this factor over the layers
VANISHED = 1e6  # Post-LN and unshaped query gradients fall by more; Pre-LN's by less ("only the Post-LN query gradients vanish", caption)
ALIKE = 1.25  # autograd's and the law's geometric means; a picture over decades does not show a smaller ratio
AT_ONCE = 4  # networks of the exact law in a job
SLOW = "they fall by three to four orders of magnitude and lie far below the shaped network's; the threshold is the one for Post-LN"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fig. gradients: "the architecture is the same as in Fig. rho_path_density but with autoregressive causal masking"."""

    n: int = 200
    d: int = 150
    gamma: float = 8**-0.5
    networks: int = 16
    sequences: int = 16
    drawn: int = 64
    """Networks of the exact law. They take the networks' texts in turn."""
    python: str = field(default_factory=platform.python_version)  # whose source is the text


SCALES = {"quick": Settings(networks=4, sequences=8, drawn=2), "paper": Settings()}


def settings(scale: str) -> Settings:
    return SCALES[scale]


@cache
def read_source(length: int = 2**21) -> bytes:
    """The first `length` bytes of the standard library's source, its files in the order of their names."""
    found = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= length:
            break
    return found[:length]


def draw_excerpts(count: int, length: int, seed: int) -> Int[Tensor, "{count} {length}"]:
    source = np.frombuffer(read_source(), np.uint8)
    first = np.random.default_rng(seed).integers(len(source) - length, size=count)
    return torch.from_numpy(source[first[:, None] + np.arange(length)].astype(np.int64))


def measure_gradient_norms(
    settings: Settings, model: str, counts: tuple[int, ...], seed: int, device: str
) -> Float[np.ndarray, "count 2 layer"]:
    """Norms of dloss/dW^V and dloss/dW^Q of every layer of one random network, for sequences of each number of tokens.

    Computed in double precision: collapsed tokens differ by less than the rounding of single precision.
    """
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    block = make_models(settings.gamma, mask="causal")[model]
    stack = nn.Sequential(*(block.module(settings.n, **options) for _ in range(settings.d))).to(device).requires_grad_(False)
    embedding, readout = (torch.randn(BYTES, settings.n, **options).to(device) for _ in range(2))
    attentions = [module for module in stack.modules() if isinstance(module, RandomAttention)]
    wanted = [attention.value for attention in attentions] + [attention.query for attention in attentions]
    for weight in wanted:
        weight.requires_grad_(True)
    norms = []
    for m in counts:
        sequences = draw_excerpts(settings.sequences, m + 1, seed).to(device)
        tokens = stack(embedding[sequences[:, :-1]])
        tokens = layer_norm(tokens) if model == "preln" else tokens  # a Pre-LN Transformer ends with a LayerNorm
        logits = tokens @ readout.T / math.sqrt(settings.n)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, wanted)
        norms.append(torch.stack([gradient.norm() for gradient in gradients]).view(2, -1).cpu().numpy())
    return np.stack(norms)


def simulate_gradient_norms(
    settings: Settings, model: str, m: int, seeds: Sequence[int], block: int, device: str
) -> Float[np.ndarray, "network 2 layer"]:
    """The same norms in their exact law, drawn without weights, for one network on each of the seeds' texts.

    The sequences of a text stand one after the other, and a mask keeps them apart.
    """
    batch, place = len(seeds), torch.device(device)
    forward, back = (Stream(seeds[0], block, kind=f"fig2, {way}", dtype=torch.float64, device=place) for way in ("forward", "back"))
    excerpts = torch.stack([draw_excerpts(settings.sequences, m + 1, seed) for seed in seeds]).to(place)
    ids, targets = excerpts[..., :-1].flatten(1), excerpts[..., 1:].flatten(1)
    mask = torch.block_diag(*[torch.ones(m, m, dtype=torch.float64).tril()] * settings.sequences).log()
    layer = make_models(settings.gamma, mask=mask)[model]
    X = forward.normal(batch, BYTES, settings.n)[torch.arange(batch, device=place)[:, None], ids]

    def find_loss(X: Tokens, products: Products) -> Float[Tensor, " batch"]:
        X = layer_norm(X) if model == "preln" else X
        logits = products.multiply(X, "readout", partial(draw_normals, columns=BYTES)) / math.sqrt(settings.n)
        return nn.functional.cross_entropy(logits.mT, targets, reduction="none").mean(-1)

    layers = [WeightlessLayer(layer, Sizes(settings.n), X)] * settings.d
    found = backpropagate_chain(layers, X, Products(forward, back), find_loss).weights
    return torch.stack([found[weight] for weight in WEIGHTS]).sqrt().permute(2, 0, 1).cpu().numpy()


def compute(settings: Settings, simulator: Simulator) -> Result:
    seeds = [1000 * simulator.seed + i for i in range(settings.networks)]
    jobs: dict[Any, Any] = {
        (name, seed): partial(measure_gradient_norms, settings, name, simulator.token_counts, seed, simulator.device)
        for seed in seeds
        for name in MODELS
    }
    texts = [seeds[i % len(seeds)] for i in range(settings.drawn)]
    parts = [texts[first : first + AT_ONCE] for first in range(0, settings.drawn, AT_ONCE)]
    jobs |= {
        (name, "law", block): partial(simulate_gradient_norms, settings, name, simulator.tokens, part, block, simulator.device)
        for block, part in enumerate(parts)
        for name in MODELS
    }
    found = simulator.run(jobs)
    claims: list[Row] = []
    arrays: dict[str, np.ndarray] = {"layer": np.arange(1, settings.d + 1)}
    for i, m in enumerate(simulator.token_counts):
        logs = {name: take_log10(np.stack([found[name, seed][i] for seed in seeds])) for name in MODELS}
        claims += judge_gradients(m, logs)
        if m == simulator.tokens:
            laws = {name: take_log10(np.concatenate([found[name, "law", block] for block in range(len(parts))])) for name in MODELS}
            claims += judge_laws(m, logs["shaped"], laws["shaped"])
            for name in MODELS:
                for k, weight in enumerate(WEIGHTS):
                    bounds = [mean_interval(column) for column in logs[name][:, k].T]
                    arrays[f"{weight}_{name}"] = 10.0 ** np.array([(mean, low, high) for mean, (low, high) in bounds])
                    law = laws[name][:, k]
                    arrays[f"{weight}_{name}_law"] = 10.0 ** np.stack([law.mean(0), *np.quantile(law, [0.05, 0.95], axis=0)], 1)
    return Result(arrays, claims)


def take_log10(norms: np.ndarray) -> np.ndarray:
    return np.log10(norms.clip(min=1e-300))


def judge_laws(m: int, logs: Float[np.ndarray, "network 2 layer"], laws: Float[np.ndarray, "drawn 2 layer"]) -> list[Row]:
    """Judges the ratio of the geometric means, over layers and networks, of the shaped networks' norms and their law's.

    The difference of the logarithms is taken text by text.
    """
    rows = []
    for k, weight in enumerate(WEIGHTS):
        texts = min(len(logs), len(laws))
        expected = np.array([laws[text :: len(logs), k].mean() for text in range(texts)])
        mean, (low, high) = mean_interval(logs[:texts, k].mean(-1) - expected)
        ratio, interval = 10.0 ** abs(mean), (10.0 ** max(low, -high, 0.0), 10.0 ** max(high, -low))
        claim = f"shaped: the exact law describes the {weight} gradients; ratio of the geometric means, the larger one above"
        rows.append(judge(f"fig2.law.{weight}", m, claim, ratio, interval, at_most=ALIKE))
    return rows


def judge_gradients(m: int, logs: dict[str, Float[np.ndarray, "network 2 layer"]]) -> list[Row]:
    """`logs` are log10 of the norms. Judges the ratio of the largest to the smallest norm over the layers, as a geometric mean over
    networks."""

    def spread(name: str, weight: str) -> tuple[float, tuple[float, float]]:
        of_layers = logs[name][:, WEIGHTS.index(weight)]
        mean, (low, high) = mean_interval(of_layers.max(1) - of_layers.min(1))
        return 10.0**mean, (10.0**low, 10.0**high)

    words = "largest over smallest norm over the layers"
    return [
        judge("fig2.shaped.value", m, f"shaped: value gradients are stable; {words}", *spread("shaped", "value"), at_most=STEADY),
        judge("fig2.shaped.query", m, f"shaped: so are query gradients; {words}", *spread("shaped", "query"), at_most=STEADY),
        judge("fig2.postln.value", m, f"Post-LN: value gradients are stable; {words}", *spread("postln", "value"), at_most=STEADY),
        judge("fig2.postln.query", m, f"Post-LN: query gradients vanish; {words}", *spread("postln", "query"), at_least=VANISHED),
        judge(
            "fig2.unshaped.query",
            m,
            f"unshaped: query gradients vanish; {words}",
            *spread("unshaped", "query"),
            at_least=VANISHED,
            why=SLOW,
        ),
        judge("fig2.preln.query", m, f"Pre-LN: query gradients do not vanish; {words}", *spread("preln", "query"), at_most=VANISHED),
    ]


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> Figure:
    from matplotlib.lines import Line2D

    from shaped.figures.harness.style import BLACK, COLOURS, LINES, NAMES, darken, make_panels

    figure, panels = make_panels(2)
    for axes, weight, symbol in zip(panels, WEIGHTS, "VQ", strict=True):
        for name in MODELS:
            value, low, high = arrays[f"{weight}_{name}"].T
            axes.plot(arrays["layer"], value, color=COLOURS[name], label=NAMES[name])
            axes.fill_between(arrays["layer"], low, high, color=COLOURS[name], alpha=0.25, linewidth=0)
            mean, low, high = arrays[f"{weight}_{name}_law"].T
            axes.plot(arrays["layer"], mean, LINES["sde"], color=darken(COLOURS[name]), linewidth=0.8)
            axes.fill_between(arrays["layer"], low, high, color=COLOURS[name], alpha=0.12, linewidth=0)
        axes.set(
            xlabel=r"layer $\ell$",
            ylabel=rf"$\Vert\partial\mathcal{{L}}/\partial W^{symbol}_\ell\Vert$",
            yscale="log",
            xlim=(1, arrays["layer"][-1]),
        )
    panels[0].set(ylim=(1e-2, 1))
    handles, _ = panels[1].get_legend_handles_labels()
    law = Line2D([], [], color=BLACK, linestyle=LINES["sde"], linewidth=0.8, label="exact law")
    panels[1].legend(handles=[*handles, law], loc="lower left")
    return figure


def describe(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    from shaped.figures.harness.style import NAMES

    def list_ends(weight: str) -> str:
        return ", ".join(
            f"{NAMES[name]} from {arrays[f'{weight}_{name}'][0, 0]:.2g} to {arrays[f'{weight}_{name}'][-1, 0]:.2g}" for name in MODELS
        )

    return (
        f"Gradient norms from the first to the last of {len(arrays['layer'])} layers, on logarithmic axes, each with the dashed curve "
        f"of its law. Left, value weights: {list_ends('value')}. Right, query weights: {list_ends('query')}."
    )
