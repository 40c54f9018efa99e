"""Sees every attention and every activation that a model computes, whatever its classes are.

A `TorchFunctionMode` is called for each PyTorch function. Attention is `scaled_dot_product_attention`, `shaped_attention`, or a softmax
over the last dimension of a product of two activations. The attention within `nn.MultiheadAttention` is one of these.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shaped.diagnosis.one_pass.flow import Flow, iterate_floats
from shaped.diagnosis.one_pass.quantities import bound_logits
from shaped.nn.attention import MASKED, shaped_attention
from shaped.nn.diagnostics import at_least_single, iterate_logits

SOFTMAXES = {torch.softmax, torch.special.softmax, Tensor.softmax, F.softmax}
ACTIVATIONS = {
    *(F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu),
    *(F.gelu, F.silu, F.mish, F.hardswish, F.softplus, F.hardtanh),
}
"""Functions of one tensor that act on each entry alone."""
PARTS_OF_ACTIVATIONS = {torch.tanh, Tensor.tanh, F.tanh, torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.erf, Tensor.erf}
"""Within a module without parameters these say that the module is an activation function, such as GPT-2's GELU."""
ENTRIES = 2**20
"""Logits that are computed at a time."""

Logits = Callable[[], Iterator[tuple[slice, Tensor]]]


def is_attention(scores: Flow, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> bool:
    """Is a softmax with these arguments one of a query's products with all keys?"""
    return dim is not None and dim % input.ndim == input.ndim - 1 and scores.find(input).is_score


class Observer(Protocol):
    """What a `CallWatcher` reports to."""

    flow: Flow
    sequences: int | None
    """How many of the batch the reported logits are of; all by default. Shape and mask are of the whole batch."""

    def see_attention(self, mask: Tensor | None, logits: Logits, shape: tuple[int, ...], bound: float) -> None:
        """After it, with the mask if one was given, the softmax's inputs, some queries at a time, their shape, (batch, heads, Q, K), and
        what they cannot pass, infinity where nothing bounds them."""

    def see_activation(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """Before it, with its input."""

    def see_part_of_activation(self) -> None: ...

    def count_sequences(self, first: int, Q: int) -> int:
        """The batch size of logits [batch · heads, Q, K]."""
        ...

    def arrange_logits(self, s: Tensor) -> Tensor:
        """Inputs of a softmax, of four dimensions, in the order [batch, heads, Q, K]."""
        ...


class CallWatcher(TorchFunctionMode):
    """Reports attention and activation calls while it is active."""

    def __init__(self, observer: Observer):
        super().__init__()
        self.observer, self.flow, self.first = observer, observer.flow, observer.sequences
        self._paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            with torch._C.DisableTorchFunction():  # so that the mode costs nothing meanwhile
                yield
        finally:
            self._paused = before

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # within this method the mode is off
                return SEEN_MULTI_HEAD_ATTENTION(*args, **kwargs)
        given = list(iterate_floats((args, kwargs)))
        is_fused = func is F.scaled_dot_product_attention or func is shaped_attention
        if is_fused or (func in SOFTMAXES and is_attention(self.flow, *args, **kwargs)):
            result = func(*args, **kwargs)
            self.flow.see_attention(func, given, result)
            if is_fused:
                self._report_fused(func, *args, **kwargs)
            else:
                self._report_softmax(*args, **kwargs)
            return result
        if func in ACTIVATIONS:
            rest = {name: value for name, value in kwargs.items() if name != "input"}
            self.observer.see_activation(lambda x: func(x, *args[1:], **rest), args[0] if args else kwargs["input"])
        elif func in PARTS_OF_ACTIVATIONS:
            self.observer.see_part_of_activation()
        self.flow.see_inputs(given)
        result = func(*args, **kwargs)
        self.flow.see_result(func, given, result)
        return result

    def _report_softmax(self, input: Tensor, *_: Any, **__: Any) -> None:
        check_size(input.shape)
        s = self.observer.arrange_logits(input.detach()) if input.ndim == 4 else input.detach()
        Q, K = s.shape[-2:]
        batch = self.observer.count_sequences(s.shape[0], Q) if s.ndim == 3 else 1
        s = s.unflatten(0, (batch, -1)) if s.ndim == 3 else s.flatten(0, -4)

        def logits() -> Iterator[tuple[slice, Tensor]]:
            some = s[: self.first]
            block = choose_block(some.numel() // Q)
            for start in range(0, Q, block):
                rows = slice(start, min(start + block, Q))
                yield rows, some[..., rows, :]

        seen = ~(s.amax((1, 2)) <= MASKED)[:, None, None]  # keys that some query may attend to; nan is not masked
        self.observer.see_attention(seen, logits, (*s.shape[:2], Q, K), math.inf)

    def _report_fused(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        positions: Tensor | None = None,
        **_: Any,
    ) -> None:
        Q, K = query.shape[-2], key.shape[-2]
        check_size((*query.shape[:-1], K))
        if func is not shaped_attention and is_causal:
            positions = torch.arange(Q, device=query.device)  # in PyTorch's mask query 0 is at key 0, also where Q and K differ
        single_head = query.ndim == 3 and self.observer.count_sequences(query.shape[0], Q) == query.shape[0]
        q, k = (bring_to_four_dimensions(x.detach(), single_head) for x in (query, key))
        mask = attn_mask
        if mask is not None:
            mask = mask.detach().expand(*query.shape[:-1], K) if query.ndim > 4 else mask.detach()
            mask = bring_to_four_dimensions(mask, single_head)
            mask = mask.masked_fill(mask <= MASKED, -torch.inf) if mask.is_floating_point() else mask

        def logits() -> Iterator[tuple[slice, Tensor]]:
            singles = [at_least_single(x[: self.first]) for x in (q, k)]
            block = choose_block(singles[0].shape[0] * q.shape[1] * K)
            bias = mask if mask is None or mask.shape[0] == 1 else mask[: self.first]
            bias = at_least_single(bias) if bias is not None and bias.is_floating_point() else bias
            places = positions if positions is None or positions.ndim == 1 else positions[: self.first]
            with torch.autocast(q.device.type, enabled=False):
                yield from iterate_logits(*singles, scale=scale, is_causal=is_causal, attn_mask=bias, block=block, positions=places)

        some = None if mask is None or not mask.is_floating_point() else mask[: self.first]
        has_bias = some is not None and bool(((some != 0.0) & some.isfinite()).any())
        bound = math.inf if has_bias else bound_logits(q[: self.first], k[: self.first], scale)
        self.observer.see_attention(mask, logits, (*q.shape[:2], Q, K), bound)


def bring_to_four_dimensions(x: Tensor, single_head: bool) -> Tensor:
    """[batch, heads, …]. Three dimensions are a batch with a single head, or heads without a batch."""
    if x.ndim > 4:
        return x.flatten(0, -4)
    return x.unsqueeze(1) if x.ndim == 3 and single_head else x[(None,) * (4 - x.ndim)]


def check_size(shape: tuple[int, ...]) -> None:
    """Of logits. What raises during the model's call is told as an error of the batch."""
    if 0 in shape:
        raise ValueError(f"it has no tokens, the logits of its attention are {list(shape)}")


def choose_block(a_query: int) -> int:
    """How many queries fit into ENTRIES logits."""
    return max(1, ENTRIES // max(1, a_query))


def expose_to_modes(function: Any) -> Any:
    """The same Python function, which runs its body at once in place of handing itself to the mode: so the mode sees what it calls."""
    scope = function.__globals__ | {"has_torch_function": lambda *_: False}
    exposed = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    exposed.__kwdefaults__ = function.__kwdefaults__
    return exposed


SEEN_MULTI_HEAD_ATTENTION = expose_to_modes(F.multi_head_attention_forward)
