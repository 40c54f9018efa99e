"""The training step: loss, gradients, optimiser, with all numbers that change from step to step on the device.

A chunk of batches and of the schedule (learning rates, shaping) is copied to the device at a time. The steps of a chunk then need nothing
from the host, and on a GPU each of them is one CUDA graph. The same code runs on a CPU, where a resumed run repeats every bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shaped.nn.schedules import Shapeable
from shaped.process import quote_error
from shaped.train.step.attention_backends import attention_backend
from shaped.train.step.config import StepConfig, StepSchedule
from shaped.train.step.direct_gradients import install_direct_embeddings, install_direct_linears
from shaped.train.step.flat_parameters import ALIGNED, group_parameters
from shaped.train.step.objectives.losses import Loss
from shaped.train.step.optimisers import OPTIMISERS

Log = Callable[[str], object]
Batch = tuple[Tensor, ...]
WARM_UP = 3  # real steps before a graph is captured: kernels are compiled and buffers made in them


class Stepper:
    """Trains a model in place: its parameters are views of the groups' vectors.

    Args:
        model: its values are copied; from then on it always has the current ones.
        loss: makes the loss of a model; called with a twin of the model, whose matrices are bfloat16 if `config.half`.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, str, torch.dtype], Loss], config: StepConfig, log: Log = print):
        self.config, self.log = config, log
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._optimiser = OPTIMISERS[config.optimiser]
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        if frozen:
            raise ValueError(f"model must have no frozen parameters, got {frozen[0]}, whose requires_grad is False")
        self.groups = group_parameters(model, config.half, config.device, self._optimiser.state)
        self.kinds = [group.kind for group in self.groups]
        self.model, self.twin = model, copy.deepcopy(model).to(config.device)
        working = {name: view for group in self.groups for name, view in group.views(group.working).items()}
        parameters = dict(self.twin.named_parameters())
        for name, view in working.items():
            parameters[name].data = view
        in_place = install_direct_linears(self.twin, working, self.gradients())
        in_place |= install_direct_embeddings(self.twin, working, self.gradients())
        # The other gradients come from autograd. They are copied into the groups, those of a group by one call.
        left = [{name: view for name, view in group.views(group.gradients).items() if name not in in_place} for group in self.groups]
        self.leaves = [parameters[name] for views in left for name in views]
        self._gradients = [list(views.values()) for views in left if views]
        # One row a shaping scalar, so far apart that compiled kernels need no aligned copies of them.
        self._starts = torch.zeros(len(_find_shaping(model)), ALIGNED, device=config.device)
        self._shares = torch.zeros_like(self._starts)
        _set_buffers(self.twin, self._shares)
        self.eager_loss = loss(self.twin, "off", config.stream)
        self.loss: Callable[..., Tensor] = self._compile_loss(loss)
        update = self._optimiser.update
        self._update = update if config.compile == "off" else torch.compile(update, dynamic=False)
        self._step = torch.zeros((), dtype=torch.int64, device=config.device)
        self._slot = torch.zeros(1, dtype=torch.int64, device=config.device)
        self._alive = torch.ones((), dtype=torch.bool, device=config.device)
        self._losses = torch.zeros(config.chunk, device=config.device)
        self._rows = torch.zeros(config.chunk, 2 + len(self.kinds) + len(self._optimiser.scalars(0)), device=config.device)
        self._batches: list[Tensor] = []
        self._graph: Any = None
        self._graphs, self._warm = config.graph, 0
        self.adopt(model)

    def values(self) -> dict[str, Tensor]:
        """The parameters in float32, by name: views."""
        return {name: view for group in self.groups for name, view in group.views(group.values).items()}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step, by name: views."""
        return {name: view for group in self.groups for name, view in group.views(group.gradients).items()}

    def gradients_of(self, batch: Batch) -> dict[str, Tensor]:
        """The gradients of one batch, computed eagerly. No step is taken."""
        compiled, self.loss = self.loss, self.eager_loss
        try:
            self._differentiate(batch)
        finally:
            self.loss = compiled
        return self.gradients()

    @property
    def step(self) -> int:
        """Steps done. It no longer moves once a loss was not finite."""
        return int(self._step)

    def adopt(self, model: nn.Module) -> None:
        """Starts again at step 0 with another model of the same shapes, whose parameters become views. Nothing is compiled again."""
        with torch.no_grad():
            views = self.values()
            for name, parameter in model.named_parameters():
                views[name].copy_(parameter)
                parameter.data = views[name]
            for group in self.groups:
                for vector in group.state.values():
                    vector.zero_()
                group.renew_working_copy()
            twins = dict(self.twin.named_buffers())
            for name, buffer in model.named_buffers():  # gains that are not trained; the shaping scalars follow below
                twins[name].copy_(buffer)
            starts = [start for _, _, start in _find_shaping(model)]
            self._starts.copy_(torch.tensor(starts, dtype=torch.float32)[:, None])
            self._shares.copy_(self._starts)
        _set_buffers(model, self._shares)
        model.to(self.config.device)  # the remaining buffers
        self.model = model
        self._step.zero_()
        self._alive.fill_(True)

    def state(self) -> dict[str, Tensor]:
        """Everything that changes, but the number of the step."""
        state = {}
        for group in self.groups:
            state |= {f"{group.kind}.{name}": vector for name, vector in {"values": group.values, **group.state}.items()}
        return state | {"shaping": self._shares}

    def layout(self) -> dict[str, Any]:
        """The shapes of the parameters in each group, by name, for checkpoints."""
        return {group.kind: {name: list(shape) for name, shape in group.shapes.items()} for group in self.groups}

    def fits(self, state: dict[str, Tensor]) -> bool:
        """Does it have the names, shapes and dtypes of this stepper's state? `load` alone would broadcast other shapes."""

        def about(tensors: dict[str, Tensor]) -> dict[str, Any]:
            return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

        return about(state) == about(self.state())

    def load(self, state: dict[str, Tensor], step: int) -> None:
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])
            for group in self.groups:
                group.renew_working_copy()
        self._step.fill_(step)

    def set_share(self, share: float) -> None:
        """Sets the shaping to a share of its start, as each step does for itself. Trained shaping does not change."""
        torch.mul(self._starts, share, out=self._shares)

    def run(self, batches: Batch, schedule: StepSchedule) -> list[float]:
        """Steps over a chunk of batches, [steps, ...], and their losses. After a loss that is not finite nothing changes any more."""
        count, step = len(batches[0]), self.step
        if not self._batches:
            self._batches = [batch.new_zeros(self.config.chunk, *batch.shape[1:]) for batch in batches]
        for buffer, batch in zip(self._batches, batches, strict=True):
            buffer[:count].copy_(batch)
        self._rows[:count].copy_(torch.tensor([schedule.row(step + i, self.kinds, self._optimiser) for i in range(count)]))
        self._slot.zero_()
        self._losses.fill_(math.nan)
        for _ in range(count):
            self._advance()
        return self._losses[:count].tolist()

    def _advance(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        if self._graphs and self._warm >= WARM_UP:
            self._capture()
            if self._graph is not None:
                self._graph.replay()
                return
        if self._graphs:  # CUDA graphs want their warm-up on a side stream
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._take_step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            self._take_step()
        self._warm += 1

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # A higher priority than the side stream (`shaped.kernels.side_stream`), which may wait.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):
                self._take_step()
            self._graph = graph
        except RuntimeError as error:
            torch.cuda.synchronize()
            self._graphs = False
            self.log(f"no CUDA graph, steps are launched one by one: {quote_error(error)}")

    def _take_step(self) -> None:
        batch = tuple(buffer.index_select(0, self._slot)[0] for buffer in self._batches)
        scalars, share, clip, rates = StepSchedule.unpack(self._rows.index_select(0, self._slot)[0], self.kinds)
        torch.mul(self._starts, share, out=self._shares)
        try:
            loss = self._differentiate(batch)
        except Exception as error:  # nothing has changed yet
            self._stop_compiling(error)
            loss = self._differentiate(batch)
        if self._world > 1:
            for tensor in (loss, *(group.gradients for group in self.groups)):
                dist.all_reduce(tensor)
                tensor.div_(self._world)
        norms = torch.stack([torch.linalg.vector_norm(group.gradients, dtype=torch.float32) for group in self.groups])
        self._alive.logical_and_(loss.isfinite() & norms.isfinite().all())
        factor = torch.ones_like(clip)
        if self.config.clips:
            factor = (clip / norms.norm()).clamp(max=1.0)
        # A GPU decides for itself whether to update: reading the flag would synchronise. On a CPU it can be read.
        alive = None if self.config.device.type == "cpu" and bool(self._alive) else self._alive
        for group, lr in zip(self.groups, rates, strict=True):
            working = None if group.working is group.values else group.working
            given = (group.values, tuple(group.state.values()), group.gradients, working, factor, lr, scalars, alive)
            try:
                self._update(*given)
            except Exception as error:
                self._stop_compiling(error)
                self._update(*given)
        self._losses.index_copy_(0, self._slot, loss.view(1))
        self._slot.add_(1)
        self._step.add_(self._alive)

    def _differentiate(self, batch: Batch) -> Tensor:
        with self.forward_context():
            loss = self.loss(*batch)
        with self.attention_backend():  # `kernels.attention_correction` chooses its kernel again in the backward pass
            gradients = iter(torch.autograd.grad(loss, self.leaves))
        for views in self._gradients:
            torch._foreach_copy_(views, [next(gradients) for _ in views])  # pyright: ignore[reportPrivateImportUsage]
        return loss.detach()

    def _stop_compiling(self, error: Exception) -> None:
        """Falls back to eager code if a compiler failed, PyTorch's or Triton. Raises any other error again."""
        from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

        ours = type(error).__module__.startswith("triton.")  # by name, since Triton may not be installed
        if self.loss is self.eager_loss or not (ours or isinstance(error, TorchDynamoException)):
            raise error
        self.loss, self._update = self.eager_loss, self._optimiser.update
        self.log(f"not compiled, which is slower: {quote_error(error)}")

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """For every forward pass: the chosen attention kernel, and autocast to bfloat16 if this stepper trains so.

        Autocast keeps no cache, since the working copies of the weights are bfloat16 already.
        """
        autocast = torch.autocast(self.config.device.type, torch.bfloat16, enabled=self.config.half, cache_enabled=False)
        with self.attention_backend(), autocast:
            yield

    def attention_backend(self) -> AbstractContextManager[None]:
        """The chosen attention kernel, for the duration; without autocast, for those who look at the float32 model."""
        return attention_backend(self.config.attention, self.config.device)

    def _compile_loss(self, loss: Callable[[Any, str, torch.dtype], Loss]) -> Callable[..., Tensor]:
        if self.config.compile == "off":
            return self.eager_loss
        if hasattr(torch._dynamo.config, "recompile_limit"):
            torch._dynamo.config.recompile_limit = 64  # several shapes and models in one process
        if self.config.compile == "whole":
            return torch.compile(self.eager_loss, dynamic=False, fullgraph=True)
        return loss(self.twin, "blocks", self.config.stream)


def _find_shaping(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """The shaping scalars that a schedule sets: module, name, start. Trained ones are parameters and not among them."""
    found = []
    for module in model.modules():
        if isinstance(module, Shapeable):
            starts = module.start if isinstance(module.start, tuple) else (module.start,)
            names = [name for name, _ in module.named_buffers(recurse=False)]
            found += [(module, name, start) for name, start in zip(names, starts, strict=False)]
    return found


def _set_buffers(model: nn.Module, shares: Tensor) -> None:
    for (module, name, _), share in zip(_find_shaping(model), shares, strict=True):
        module.register_buffer(name, share[:1])
