"""The limit of the gradient's norm for one token (docs/gradients.md), and networks of growing width beside it.

PYTHONPATH=tests/gradients python tests/gradients/one_token.py
"""

import math
from typing import Any

import torch
from autograd_networks import find_distances
from torch import Tensor

import shaped
from shaped.testing.stats import generator, seed

GAMMA, OUTPUTS = 0.6, 5


def halved_square(outputs: Tensor) -> Tensor:
    return outputs.square().sum((-2, -1)) / 2


def solve_limit(T: float, steps: int, samples: int, number: int, coupled: bool = True) -> dict[str, Tensor]:
    r"""$dV = \sqrt{2\kappa}\,V\,dB$; backward in time $dR = \kappa(c^2/V - R)\,ds + \sqrt{2\kappa}\,R\,dB'$, without drift if not coupled.

    For the loss `halved_square` both $R_T$ and c are the squared norm of the outputs.
    """
    g, h, kappa = generator(number), T / steps, GAMMA**2 * (2 - GAMMA**2)
    normals = torch.randn(2 * steps, samples, generator=g, dtype=torch.float64) * math.sqrt(2 * kappa * h) - kappa * h
    V = torch.cat([torch.ones(1, samples, dtype=torch.float64), normals[:steps].cumsum(0).exp()])
    R = c = V[-1] * torch.randn(samples, OUTPUTS, generator=g, dtype=torch.float64).square().sum(-1)
    for step in range(steps, 0, -1):
        growth = normals[steps + step - 1].exp()
        R = growth * math.exp(-kappa * h) * (R + kappa * h * c**2 / V[step]) if coupled else growth * R
    return {"gradient": R.log(), "loss": (c / 2).log(), "V": V[-1].log()}


def draw_networks(n: int, T: float, samples: int, number: int, **options: Any) -> dict[str, Tensor]:
    layer, V0 = shaped.ShapedAttention(GAMMA), torch.ones(1, 1)
    how: dict[str, Any] = {"n": n, "d": int(T * n), "outputs": OUTPUTS, "loss": halved_square, "samples": samples, "seed": seed(number)}
    found = shaped.backpropagate(layer, V0, **how, **options)
    return {"gradient": found.tokens[0].log(), "loss": found.loss.log(), "V": found.V[:, 0, 0].log()}


def describe(name: str, rows: dict[str, Tensor], limits: tuple[dict[str, Tensor], ...] = ()) -> str:
    x = torch.corrcoef(torch.stack(list(rows.values())))[0]
    error = rows["gradient"].std() / len(rows["gradient"]) ** 0.5
    text = f"| {name} | {rows['gradient'].mean():.3f} ± {error:.3f} | {rows['gradient'].std():.3f} | {x[1]:.3f} | {x[2]:.3f} |"
    return text + "".join(f" {find_distances(rows, limit)['gradient']:.3f} |" for limit in limits)


def main() -> None:
    limits = tuple(solve_limit(1.0, 400, 100_000, 60 + coupled, coupled) for coupled in (True, False))
    print("| | mean | spread | correlation with log loss | with log V | KS to the limit | KS to independent matrices |")
    print("|---|---|---|---|---|---|---|")
    for n in (16, 32, 64, 128):
        print(describe(f"n = d = {n}", draw_networks(n, 1.0, 40_000 if n < 128 else 20_000, 62), limits), flush=True)
    print(describe("limit", limits[0]) + " | |")
    print(describe("independent matrices", limits[1]) + " | |")


if __name__ == "__main__":
    main()
