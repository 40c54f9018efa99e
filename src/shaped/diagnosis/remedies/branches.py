"""Weaker residual branches, whatever the model's classes are: x + factor · f(x) in place of x + f(x)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shaped.diagnosis.one_pass.flow import PRODUCTS, Flow, iterate_floats
from shaped.diagnosis.remedies.changes import CallChange
from shaped.nn.attention import shaped_attention

IN_PLACE = {Tensor.add_, Tensor.__iadd__}
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, *IN_PLACE}
WEIGHTED = PRODUCTS | {
    *(F.linear, torch.addmm, torch.mm, Tensor.mm, F.conv1d, F.conv2d, torch.conv1d, torch.conv2d),
    *(F.scaled_dot_product_attention, shaped_attention),
}


class WeakenBranches(CallChange):
    """A branch is a summand that was computed from the other summand, through a product with weights.

    So neither rotary embeddings nor sums within an activation are branches.
    """

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor
        self._flow = Flow()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = list(iterate_floats((args, kwargs)))
        if func in SUMS and len(args) == len(given) == 2 and given[0].shape == given[1].shape:
            first, second = given
            if self._is_branch(second, first):
                args = (first, self.factor * second)
            elif self._is_branch(first, second):
                args = (first.mul_(self.factor) if func in IN_PLACE else self.factor * first, second)
        result = func(*args, **kwargs)
        self._flow.see_result(func, given, result)
        return result

    def _is_branch(self, x: Tensor, stream: Tensor) -> bool:
        root, node = self._flow.find(stream), self._flow.find(x)
        between = node.trace_back(root)
        found = root in between and any(node.func in WEIGHTED for node in between - {root})
        self.applied += found
        return found
