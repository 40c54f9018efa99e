"""Changes of what a model calls, whatever its classes are: another attention, other activations. The model itself stays as it is.

Each is a `TorchFunctionMode`. It is entered after the `CallWatcher`, so that the watcher sees the changed calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shaped.diagnosis.one_pass.attention_calls import SEEN_MULTI_HEAD_ATTENTION, SOFTMAXES, is_attention
from shaped.diagnosis.one_pass.flow import Flow, iterate_floats
from shaped.nn.attention import MASKED, shaped_attention
from shaped.nn.functional import rms_norm

IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_}
RELUS = {F.relu, torch.relu, Tensor.relu, *IN_PLACE}


class CallChange(TorchFunctionMode, ABC):
    """Calls something else in place of some functions. `applied` counts these calls."""

    def __init__(self) -> None:
        super().__init__()
        self.applied = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.multi_head_attention_forward:
            with self:  # within this method the mode is off
                return SEEN_MULTI_HEAD_ATTENTION(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    @abstractmethod
    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is called in place of the function, or the function itself."""


class AttentionChange(CallChange):
    """Changes fused attention, and where a model computes its softmax itself, that softmax."""

    def __init__(self) -> None:
        super().__init__()
        self._flow = Flow()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention or func is shaped_attention:
            result = self.attend(func, *args, **kwargs)
        elif func in SOFTMAXES and is_attention(self._flow, *args, **kwargs):
            result = self.soften(func, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
            self._flow.see_result(func, list(iterate_floats((args, kwargs))), result)
        return result

    @abstractmethod
    def attend(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention, changed. `func` is the model's own."""

    def soften(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return func(input, *args, **kwargs)


class ShapeAttention(AttentionChange):
    r"""$\gamma(I + \text{softmax} - \text{softmax}(B))$ in place of the softmax (Eq. shaped-attention), as `shaped.hf.shape` has it.

    Attention with as many queries as keys is taken for self-attention; other attention stays. In a softmax that the model computes itself,
    B is its mask: a bias cannot be told from the logits there.
    """

    def __init__(self, gamma: float):
        super().__init__()
        self.gamma = gamma

    def attend(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if query.shape[-2] != key.shape[-2]:
            return func(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **kwargs)
        self.applied += 1
        kwargs.pop("enable_gqa", None)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.masked_fill(attn_mask <= MASKED, -torch.inf)
        return self.gamma * shaped_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **kwargs)

    def soften(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        A = func(input, *args, **kwargs)
        if input.shape[-2] != input.shape[-1]:
            return A
        self.applied += 1
        allowed = (input.detach() > MASKED).to(A.dtype)
        centring = allowed / allowed.sum(-1, keepdim=True).clamp(min=1.0)
        return self.gamma * (A - centring + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))


class NormaliseQueriesAndKeys(AttentionChange):
    """QK-norm (Henry et al. 2020): queries and keys are divided by their root mean square. Only for fused attention."""

    def attend(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.applied += 1
        return func(rms_norm(query), rms_norm(key), value, *args, **kwargs)


class DivideLogits(AttentionChange):
    """A temperature of the softmax."""

    def __init__(self, temperature: float):
        super().__init__()
        self.temperature = temperature

    def attend(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.applied += 1
        scale = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else kwargs["scale"]
        return func(query, key, value, *args, **kwargs | {"scale": scale / self.temperature})

    def soften(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.applied += 1
        return func(torch.where(input > MASKED, input / self.temperature, input), *args, **kwargs)


class LeakThroughReLU(CallChange):
    """Leaky ReLU in place of ReLU."""

    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in RELUS:
            return func(*args, **kwargs)
        self.applied += 1
        in_place = func in IN_PLACE or kwargs.get("inplace", False)  # the model may go on with the input
        return F.leaky_relu(args[0] if args else kwargs["input"], self.slope, inplace=in_place)
