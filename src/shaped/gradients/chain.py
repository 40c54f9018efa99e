"""Forward and back through a chain of layers that may differ, from given tokens to any loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shaped.gradients.network import WeightlessLayer
from shaped.gradients.products import Products, Tokens

FindLoss = Callable[[Tokens, Products], Float[Tensor, " batch"]]


class ChainGradients(NamedTuple):
    tokens: Float[Tensor, "stage batch"]
    """Squared norms of the gradients with respect to the tokens before each layer and after the last."""
    weights: dict[str, Float[Tensor, "layer batch"]]
    """The same for each matrix. Its entries are standard normals."""
    loss: Float[Tensor, " batch"]
    last: Tokens
    """The tokens after the last layer."""


@torch.inference_mode(False)  # as in `run_block`
def backpropagate_chain(
    layers: Sequence[WeightlessLayer],
    X: Tokens,
    products: Products,
    find_loss: FindLoss,
    advance: Callable[[], None] = lambda: None,
) -> ChainGradients:
    """Runs one block of networks. The layers have the same names of weights.

    Only the tokens between the layers are kept. The way back runs each layer again, with the same random numbers.
    `advance` is called twice for each layer, and stops the run by an exception.
    """
    forward, saved = products.forward, []
    with torch.no_grad():
        for layer in layers:
            saved.append((X, forward.save_state()))
            X, _ = layer.run(X, products)
            advance()
    last = X.detach().requires_grad_()
    loss = find_loss(last, products)
    products.forget()
    (D,) = torch.autograd.grad(loss.sum(), last)
    products.squares = {}
    tokens, weights = [D.square().sum((-2, -1))], list[dict[str, Tensor]]()
    for layer in reversed(layers):
        X, state = saved.pop()
        forward.rewind(state)
        X = X.detach().requires_grad_()
        Y, drawn = layer.run(X, products)
        D, squares = products.go_back(X, Y, drawn, D)
        tokens.append(D.square().sum((-2, -1)))
        weights.append(squares)
        advance()
    return ChainGradients(
        torch.stack(tokens[::-1]),
        {name: torch.stack([squares[name] for squares in weights[::-1]]) for name in layers[0].entries},
        loss.detach(),
        last.detach(),
    )
