r"""The limit of the gradients (docs/gradients.md), and networks of growing width beside it.

    PYTHONPATH=tests/gradients python tests/gradients/gradient_limit.py --tokens 1

V is the covariance of a layer's tokens X, D the gradient with respect to them, $R = D D^\top$ and $C = D X^\top$. The solver goes forward
with V and back with R and C. A step of length h does what h·n layers do, to the first order in h.
"""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from autograd_networks import find_distances
from torch import Tensor

import shaped
from shaped.covariance import Point, factor
from shaped.layers.logits import softmax_derivative
from shaped.layers.masks import resting_attention
from shaped.layers.terms import WeightNoise
from shaped.randomness import GeneratorNormals
from shaped.testing.stats import generator, seed

OUTPUTS = 5
UPPER = 50.0
"""A path stops where an eigenvalue of V exceeds this."""


def halved_square(outputs: Tensor) -> Tensor:
    return outputs.square().sum((-2, -1)) / 2


def trace(V: Tensor) -> Tensor:
    return V.diagonal(dim1=-2, dim2=-1).sum(-1)


@dataclass(frozen=True)
class ShapedAttentionLimit:
    r"""Forward and backward through shaped attention, in the limit.

    N is $\sqrt{n}$ times the logits, $L G L^\top/\tau_0$ with $L L^\top = V$ and normals G.
    """

    gamma: float
    tau0: float = 1.0
    mask: str | None = None

    @property
    def lam(self) -> float:
        return math.sqrt(1.0 - self.gamma**2)

    @property
    def weights(self) -> WeightNoise:
        r"""The noise of the values' matrix, which V and R both have, of scale $\kappa = \gamma^2(2 - \gamma^2)$."""
        return WeightNoise(self.gamma**2 * (2.0 - self.gamma**2))

    def expand_softmax(self, N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The attention P at zero logits, and the softmax's first and second order in N, E and E2."""
        P = resting_attention(self.mask, N.shape[-1], N).expand(N.shape[-2:])
        centred = N - (P * N).sum(-1, keepdim=True)
        return P, P * centred, softmax_derivative(P, centred.square()) / 2

    def mix(self, K: Tensor, E: Tensor, E2: Tensor, h: float) -> Tensor:
        r"""$K + \sqrt h\,\gamma^2(EK + KE^\top) + h\gamma^2(EKE^\top + E_2K + KE_2^\top)$ to first order, and positive semi-definite."""
        share = self.gamma**2
        M = torch.eye(K.shape[-1], dtype=K.dtype) + share * (math.sqrt(h) * E + h * E2)
        return M @ K @ M.mT + h * share * (1.0 - share) * E @ K @ E.mT

    def step_forward(self, V: Tensor, N: Tensor, h: float) -> Tensor:
        """The effect of the logits on V (Thm. sde-attention)."""
        _, E, E2 = self.expand_softmax(N)
        return self.mix(V, E, E2, h)

    def step_back(self, V: Tensor, R: Tensor, C: Tensor, N: Tensor, Xi: Tensor, h: float) -> tuple[Tensor, Tensor]:
        r"""R and C before layers with logits N that V enters. All but the noise of the values' matrix.

        $\Xi$ has the law of $R^{1/2}\,G\,V^{1/2}$: the overlap of D with what X has across X', the tokens that leave.
        Z is $D (XW)^\top/\sqrt n$, and $\Gamma$ the gradient with respect to the logits; both have a first order in N.
        """
        gamma, kappa, (P, E, E2) = self.gamma, self.weights.scale, self.expand_softmax(N)
        Z = gamma * C - self.lam * Xi
        Z1 = gamma * C @ (self.lam**2 * torch.linalg.solve(V, E @ V) - gamma**2 * E.mT)
        Gamma = gamma * softmax_derivative(P, Z)
        Gamma1 = gamma * (softmax_derivative(P, Z1) + E * (Z - (P * Z).sum(-1, keepdim=True)) - P * (E * Z).sum(-1, keepdim=True))
        pulled = math.exp(-kappa * h * V.shape[-1]) * (R + h * kappa * C @ torch.linalg.solve(V, C.mT))
        through_logits = (Gamma @ V @ Gamma.mT + Gamma.mT @ V @ Gamma) / self.tau0**2

        def turn(E: Tensor, Z: Tensor, Gamma: Tensor) -> Tensor:
            return gamma * (E.mT @ Z - Z @ E.mT) + Gamma @ N.mT + Gamma.mT @ N

        second = turn(E, Z1, Gamma1) + gamma * (E2.mT @ Z - Z @ E2.mT)
        return self.mix(pulled, E.mT, E2.mT, h) + h * through_logits, C + math.sqrt(h) * turn(E, Z, Gamma) + h * second

    def step_back_independent(self, V: Tensor, R: Tensor, N: Tensor, Xi: Tensor, h: float) -> Tensor:
        r"""R for new matrices on the way back. C is new in each layer, and so Z is $\Xi$."""
        P, E, E2 = self.expand_softmax(N)
        Gamma = self.gamma * softmax_derivative(P, Xi) / self.tau0
        return self.mix(R, E.mT, E2.mT, h) + h * (Gamma @ V @ Gamma.mT + Gamma.mT @ V @ Gamma)


def solve_gradients(
    limit: ShapedAttentionLimit, V0: Tensor, T: float, steps: int, samples: int, number: int, independent: bool = False
) -> dict[str, Tensor]:
    """Logarithms of the squared gradient at time 0, of the loss `halved_square`, and of the trace of V at time T."""
    normals, h = GeneratorNormals(generator(number), V0), T / steps
    V, stopped = V0.expand(samples, *V0.shape), torch.zeros(samples, dtype=torch.bool)
    path: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        V = limit.weights.move(Point(matrix=V), h, normals).V
        L = factor(V)
        path.append((V, L @ normals.square(L) @ L.mT / limit.tau0))
        V = limit.step_forward(*path[-1], h)
        stopped |= torch.linalg.eigvalsh(V)[:, -1] > UPPER
        V = torch.where(stopped[:, None, None], V0, V)
    outputs = factor(V) @ normals.normal(samples, V.shape[-1], OUTPUTS)
    last, R = V, outputs @ outputs.mT  # the gradient with respect to the outputs is the outputs
    C = R
    for V, N in reversed(path):
        Xi = factor(R) @ normals.square(R) @ factor(V).mT
        if independent:
            R = limit.step_back_independent(V, R, N, Xi, h)
        else:
            R, C = limit.step_back(V, R, C, N, Xi, h)
        R = limit.weights.move(Point(matrix=R), h, normals).V
    found = {"gradient": trace(R).log(), "loss": halved_square(outputs).log(), "V": trace(last).log()}
    return {name: row[~stopped] for name, row in found.items()}


def draw_networks(
    limit: ShapedAttentionLimit, V0: Tensor, n: int, T: float, samples: int, number: int, independent: bool = False
) -> dict[str, Tensor]:
    """The same of networks of width n."""
    layer = shaped.ShapedAttention(limit.gamma, limit.tau0, mask=limit.mask)
    how: dict[str, Any] = {"outputs": OUTPUTS, "loss": halved_square, "samples": samples, "seed": seed(number), "independent": independent}
    found = shaped.backpropagate(layer, V0, n=n, d=round(T * n), upper=UPPER, **how)
    rows = {"gradient": found.tokens[0].log(), "loss": found.loss.log(), "V": trace(found.V).log()}
    return {name: row[found.stopped.isinf()] for name, row in rows.items()}


def describe(name: str, rows: dict[str, Tensor], limits: tuple[dict[str, Tensor], ...] = ()) -> str:
    x = torch.corrcoef(torch.stack(list(rows.values())))[0]
    error = rows["gradient"].std() / len(rows["gradient"]) ** 0.5
    text = f"| {name} | {rows['gradient'].mean():.3f} ± {error:.3f} | {rows['gradient'].std():.3f} | {x[1]:.3f} | {x[2]:.3f} |"
    return text + "".join(f" {find_distances(rows, limit)['gradient']:.3f} |" for limit in limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--gamma", type=float, default=0.6)
    parser.add_argument("--tau0", type=float, default=1.0)
    parser.add_argument("--time", type=float, default=1.0)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    limit, V0, T = ShapedAttentionLimit(options.gamma, options.tau0), shaped.equicorrelated(options.tokens, 0.2), options.time
    limits = tuple(solve_gradients(limit, V0, T, options.steps, options.samples, 60 + way, bool(way)) for way in (0, 1))
    print("| | mean | spread | correlation with log loss | with log tr V | KS to the limit | KS to independent matrices |")
    print("|---|---|---|---|---|---|---|")
    for n in (16, 32, 64, 128):
        samples = options.samples if n < 128 else options.samples // 2
        print(describe(f"n = {n}, d = {round(T * n)}", draw_networks(limit, V0, n, T, samples, 62), limits), flush=True)
    print(describe("limit", limits[0]) + " | |")
    print(describe("independent matrices, n = 64", draw_networks(limit, V0, 64, T, options.samples, 63, independent=True), limits))
    print(describe("limit of independent matrices", limits[1]) + " | |")
    print(f"Of the limit's paths {1 - len(limits[0]['loss']) / options.samples:.2%} stopped.")


if __name__ == "__main__":
    main()
