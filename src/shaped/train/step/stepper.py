"""The training step: loss, gradients, Adam, with all numbers that change from step to step on the device.

A chunk of batches and of the plan (learning rates, shaping) is put on the device at a time; the step then needs nothing from the host, and
on a GPU the whole of it is one CUDA graph. The same code runs on a CPU, where a resumed run repeats every bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shaped.nn.schedules import Shapeable
from shaped.train.step.direct_gradients import put_products, put_rows
from shaped.train.step.flat_parameters import ALIGNED, BETAS, Adam, adam, vectors
from shaped.train.step.objectives import Loss

Say = Callable[[str], None]
Batch = tuple[Tensor, ...]
WARM_UP = 3  # real steps before a graph is captured: kernels are compiled and buffers made in them


@dataclass(frozen=True)
class How:
    """What the step's program depends on beside the shapes. Two runs that agree in it and in the shapes can share one `Stepper`."""

    device: torch.device
    half: bool = False
    compile: str = "off"
    graph: bool = False
    clips: bool = False
    attention: str = "auto"
    stream: torch.dtype = torch.float32
    chunk: int = 16

    @classmethod
    def of(cls, settings: Any, world: int) -> How:
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be cpu where there is no GPU, got cuda")
        gpu = kind == "cuda"
        if settings.graph == "on" and (not gpu or world > 1):
            raise ValueError(f"graph must be off or auto without a GPU or with several processes, got on for {kind} and {world}")
        half = gpu if settings.precision == "auto" else settings.precision == "bf16"
        return cls(
            device=torch.device(kind, torch.cuda.current_device()) if gpu else torch.device("cpu"),
            half=half,
            stream=torch.bfloat16 if half and settings.stream == "bf16" else torch.float32,
            compile=("blocks" if gpu else "off") if settings.compile == "auto" else settings.compile,
            graph=gpu and world == 1 and settings.graph != "off",
            clips=settings.clip > 0,
            attention=settings.attention,
            chunk=128 if gpu else 16,  # between them a GPU waits for the host, some milliseconds
        )


@dataclass(frozen=True)
class Plan:
    """What a step is told: each kind's learning rate, Adam's corrections, the share of the shaping, the largest norm of the gradient."""

    lr: Callable[[int], float]
    factors: dict[str, float]
    share: Callable[[int], float]
    clip: float = 0.0

    def row(self, step: int, kinds: list[str]) -> list[float]:
        corrections = [1.0 - beta ** (step + 1) for beta in BETAS]
        rates = [self.lr(step) * self.factors.get(kind, 1.0) for kind in kinds]
        return [*corrections, self.share(step), self.clip, *rates]


class Stepper:
    """Trains a model in place: its parameters are views of the vectors that are stepped.

    Args:
        model: its values are copied; from then on it always has the current ones.
        loss: makes the loss of a model; called with a twin of the model, whose matrices are bfloat16 if `how.half`.
        how: what the program depends on.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, str, torch.dtype], Loss], how: How, say: Say = print):
        self.how, self.say = how, say
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        if frozen:
            raise ValueError(f"model must have no frozen parameters, got {frozen[0]}, whose requires_grad is False")
        _choose_attention(how.attention)
        self.vectors = vectors(model, how.half, how.device)
        self.kinds = [vector.kind for vector in self.vectors]
        self.model, self.twin = model, copy.deepcopy(model).to(how.device)
        working = {name: view for vector in self.vectors for name, view in vector.views(vector.working).items()}
        parameters = dict(self.twin.named_parameters())
        for name, view in working.items():
            parameters[name].data = view
        written = put_products(self.twin, working, self.gradients()) | put_rows(self.twin, working, self.gradients())
        # The others' gradients come from autograd and are copied, those of a vector at a time.
        left = [{name: view for name, view in vector.views(vector.gradients).items() if name not in written} for vector in self.vectors]
        self.leaves = [parameters[name] for views in left for name in views]
        self._gradients = [list(views.values()) for views in left if views]
        # Views far enough apart that compiled kernels need no copies of them.
        self._starts = torch.zeros(len(_shaping(model)), ALIGNED, device=how.device)
        self._shares = torch.zeros_like(self._starts)
        _set_buffers(self.twin, self._shares)
        self.eager_loss = loss(self.twin, "off", how.stream)
        self.loss: Callable[..., Tensor] = self._prepared(loss)
        self._adam: Adam = adam if how.compile == "off" else torch.compile(adam, dynamic=False)
        self._step = torch.zeros((), dtype=torch.int64, device=how.device)
        self._slot = torch.zeros(1, dtype=torch.int64, device=how.device)
        self._alive = torch.ones((), dtype=torch.bool, device=how.device)
        self._losses = torch.zeros(how.chunk, device=how.device)
        self._plan = torch.zeros(how.chunk, 4 + len(self.kinds), device=how.device)
        self._batches: list[Tensor] = []
        self._graph: Any = None
        self._graphs, self._warm = how.graph, 0
        self.adopt(model)

    def values(self) -> dict[str, Tensor]:
        """The parameters in float32, by name: views."""
        return {name: view for vector in self.vectors for name, view in vector.views(vector.values).items()}

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step."""
        return {name: view for vector in self.vectors for name, view in vector.views(vector.gradients).items()}

    def gradients_of(self, batch: Batch) -> dict[str, Tensor]:
        """Those of one batch, without a compiler. No step is taken."""
        compiled, self.loss = self.loss, self.eager_loss
        try:
            self._differentiated(batch)
        finally:
            self.loss = compiled
        return self.gradients()

    @property
    def step(self) -> int:
        """Steps done. It no longer moves once a loss was not finite."""
        return int(self._step)

    def adopt(self, model: nn.Module) -> None:
        """Begins anew with the values of this model, of the same shapes, whose parameters become views. Nothing is compiled again."""
        with torch.no_grad():
            views = self.values()
            for name, parameter in model.named_parameters():
                views[name].copy_(parameter)
                parameter.data = views[name]
            for vector in self.vectors:
                vector.first.zero_()
                vector.second.zero_()
                vector.renew()
            twins = dict(self.twin.named_buffers())
            for name, buffer in model.named_buffers():  # gains that are not trained; the shaping follows below
                twins[name].copy_(buffer)
            starts = [start for _, _, start in _shaping(model)]
            self._starts.copy_(torch.tensor(starts, dtype=torch.float32)[:, None])
            self._shares.copy_(self._starts)
        _set_buffers(model, self._shares)
        model.to(self.how.device)  # what is neither a parameter nor a shaping
        self.model = model
        self._step.zero_()
        self._alive.fill_(True)

    def state(self) -> dict[str, Tensor]:
        """Everything that changes, but the number of the step."""
        names = ("values", "first", "second")
        return {f"{vector.kind}.{name}": getattr(vector, name) for vector in self.vectors for name in names} | {"shaping": self._shares}

    def layout(self) -> dict[str, Any]:
        return {vector.kind: {name: list(shape) for name, shape in vector.shapes.items()} for vector in self.vectors}

    def fits(self, state: dict[str, Tensor]) -> bool:
        """Has it the names, shapes and types of this stepper's state? `load` would fit other shapes in by broadcasting."""

        def about(tensors: dict[str, Tensor]) -> dict[str, Any]:
            return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

        return about(state) == about(self.state())

    def load(self, state: dict[str, Tensor], step: int) -> None:
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])
            for vector in self.vectors:
                vector.renew()
        self._step.fill_(step)

    def set_share(self, share: float) -> None:
        """Sets the shaping that a schedule governs to a share of its start, as each step does for itself."""
        torch.mul(self._starts, share, out=self._shares)

    def run(self, batches: Batch, plan: Plan) -> list[float]:
        """Steps over a chunk of batches, [steps, ...], and their losses. After a loss that is not finite nothing changes any more."""
        count, step = len(batches[0]), self.step
        if not self._batches:
            self._batches = [batch.new_zeros(self.how.chunk, *batch.shape[1:]) for batch in batches]
        for buffer, batch in zip(self._batches, batches, strict=True):
            buffer[:count].copy_(batch)
        rows = torch.tensor([plan.row(step + i, self.kinds) for i in range(count)])
        self._plan[:count].copy_(rows)
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
        if self._graphs:  # as the documentation of CUDA graphs asks, the warm-up is on a stream of its own
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._one_step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            self._one_step()
        self._warm += 1

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # A higher priority than the side stream (`shaped.kernels.side_stream`), which may wait.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):
                self._one_step()
            self._graph = graph
        except RuntimeError as error:
            torch.cuda.synchronize()
            self._graphs = False
            self.say(f"no CUDA graph, steps are launched one by one: {str(error).splitlines()[0]}")

    def _one_step(self) -> None:
        batch = tuple(buffer.index_select(0, self._slot)[0] for buffer in self._batches)
        plan = self._plan.index_select(0, self._slot)[0]
        corrections, share, clip, rates = plan[:2], plan[2], plan[3], plan[4:]
        torch.mul(self._starts, share, out=self._shares)
        loss = self._compiled_or_not(batch)
        if self._world > 1:
            for tensor in (loss, *(vector.gradients for vector in self.vectors)):
                dist.all_reduce(tensor)
                tensor.div_(self._world)
        norms = torch.stack([torch.linalg.vector_norm(vector.gradients, dtype=torch.float32) for vector in self.vectors])
        self._alive.logical_and_(loss.isfinite() & norms.isfinite().all())
        factor = torch.ones_like(clip)
        if self.how.clips:
            factor = (clip / norms.norm()).clamp(max=1.0)
        # A GPU is not asked whether the loss is finite, which would stop it: it decides for itself. A CPU can be asked.
        alive = None if self.how.device.type == "cpu" and bool(self._alive) else self._alive
        for i, vector in enumerate(self.vectors):
            working = None if vector.working is vector.values else vector.working
            tensors = (vector.values, vector.first, vector.second, vector.gradients, working)
            try:
                self._adam(*tensors, factor, rates[i], corrections, alive)
            except Exception as error:
                self._give_up_compiling(error)
                self._adam(*tensors, factor, rates[i], corrections, alive)
        self._losses.index_copy_(0, self._slot, loss.view(1))
        self._slot.add_(1)
        self._step.add_(self._alive)

    def _compiled_or_not(self, batch: Batch) -> Tensor:
        """The loss of a batch; its gradients go into the vectors."""
        try:
            return self._differentiated(batch)
        except Exception as error:  # nothing has changed yet
            self._give_up_compiling(error)
            return self._differentiated(batch)

    def _differentiated(self, batch: Batch) -> Tensor:
        with self.cast():
            loss = self.loss(*batch)
        gradients = iter(torch.autograd.grad(loss, self.leaves))
        for views in self._gradients:
            torch._foreach_copy_(views, [next(gradients) for _ in views])  # pyright: ignore[reportPrivateImportUsage]
        return loss.detach()

    def _give_up_compiling(self, error: Exception) -> None:
        """Goes on without, if it is a compiler that failed, PyTorch's or Triton."""
        from torch._dynamo.exc import TorchDynamoException  # seconds to import, and needed here alone

        ours = type(error).__module__.startswith("triton.")  # which need not be there to be imported
        if self.loss is self.eager_loss or not (ours or isinstance(error, TorchDynamoException)):
            raise error
        self.loss, self._adam = self.eager_loss, adam
        self.say(f"not compiled, which is slower: {' '.join(str(error).split())[:200]}")

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Passes in bfloat16 where that is how this trains; weights are so already, hence nothing is to be remembered."""
        with torch.autocast(self.how.device.type, torch.bfloat16, enabled=self.how.half, cache_enabled=False):
            yield

    def _prepared(self, loss: Callable[[Any, str, torch.dtype], Loss]) -> Callable[..., Tensor]:
        if self.how.compile == "off":
            return self.eager_loss
        if hasattr(torch._dynamo.config, "recompile_limit"):
            torch._dynamo.config.recompile_limit = 64  # several shapes and models in one process
        if self.how.compile == "whole":
            return torch.compile(self.eager_loss, dynamic=False, fullgraph=True)
        return loss(self.twin, "blocks", self.how.stream)


def _shaping(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """The numbers of the shaping that a schedule sets: module, name, where it starts. Those that are trained are not among them."""
    found = []
    for module in model.modules():
        if isinstance(module, Shapeable):
            starts = module.start if isinstance(module.start, tuple) else (module.start,)
            names = [name for name, _ in module.named_buffers(recurse=False)]
            found += [(module, name, start) for name, start in zip(names, starts, strict=False)]
    return found


def _set_buffers(model: nn.Module, shares: Tensor) -> None:
    for (module, name, _), share in zip(_shaping(model), shares, strict=True):
        module.register_buffer(name, share[:1])


def _choose_attention(kernel: str) -> None:
    """Which of PyTorch's kernels may compute attention. The plain form is always allowed: it takes what the others refuse."""
    if torch.cuda.is_available():
        for name in ("flash", "cudnn", "mem_efficient"):
            wanted = kernel == "auto" or name.removeprefix("mem_") == kernel
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(wanted)
