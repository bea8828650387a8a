"""Learning stages of any provider: passes, sums of gradients, steps and states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.split import WeightPass

# megatron-core's, in ``clip_grad_by_total_norm_fp32``.
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Adam's settings; ``clip_grad`` is a limit of the norm over all modules, 0 for none."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    epsilon: float = 1e-8
    clip_grad: float = 1.0
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)


class LearningStage(ABC):
    """A stage of a model with its gradients and its optimizer, by any provider.

    ``stage`` are the layers, whose ``passes_gradients`` says whether anything before them wants the gradient of their
    input; ``optimizer`` is None if it is the user's. ``degree`` is an entry of ``ModuleLayout.degrees``, ``last`` and
    ``closes`` are those of ``Step``.
    """

    __slots__ = ()

    stage: Any
    optimizer: Any
    groups: StageGroups
    widths: Mapping[int, StageGroups]

    @property
    @abstractmethod
    def meets(self) -> bool:
        """Whether replicas go through passes together."""

    def at(self, degree: int) -> StageGroups:
        """The groups that run chunks of a degree."""
        return self.widths.get(degree, self.groups)

    @abstractmethod
    def forward(self, leaf: Tensor | None, pack: Any, degree: int = 0) -> Tensor:
        """The stage's output for a chunk: the LLM's last gives a summed loss."""

    def backward(
        self,
        output: GradientEdge,
        gradient: Tensor,
        leaf: Tensor | None,
        degree: int = 0,  # noqa: ARG002
        *,
        last: bool = False,  # noqa: ARG002
        closes: bool = False,  # noqa: ARG002
    ) -> Tensor | None:
        """Add to the stage's gradients; returns that of ``leaf``."""
        torch.autograd.backward([output], [gradient])
        return None if leaf is None else leaf.grad

    def backward_inputs(
        self,
        output: GradientEdge,
        gradient: Tensor,
        leaf: Tensor | None,
        degree: int,  # noqa: ARG002
    ) -> tuple[Tensor | None, WeightPass]:
        """The first pass of a split backward; returns the gradient of ``leaf``, and the second pass."""
        passes: tuple[Tensor | None, WeightPass] = self.stage.backward_inputs(output, gradient, leaf)
        return passes

    def backward_weights(self, left: WeightPass, *, last: bool, closes: bool = False) -> None:  # noqa: ARG002
        """Run a second pass."""
        left.run()

    @abstractmethod
    def empty_pass(self, remade: int, example: Callable[[], Any]) -> Iterator[None]:
        """A forward, then a backward that no sample is in; to be advanced once for each.

        ``remade`` blocks run again in backward, and ``example`` makes the pack of a unit that another replica runs.
        """

    def start_sums(self) -> None:  # noqa: B027
        """Begin the remaining sums of gradients over replicas, where they can run ahead."""

    def start_gather(self) -> None:  # noqa: B027
        """Begin to gather weights that the optimizer step left sharded, if it does."""

    def gather_weights(self) -> None:  # noqa: B027
        """Gather weights that the optimizer step left sharded, if it does; collective over replicas."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the last iteration's gradients."""

    @abstractmethod
    def sync_gradients(self) -> None:
        """Sum gradients over all ranks that hold the parameter."""

    @abstractmethod
    def gradient_square(self) -> Tensor:
        """This rank's share of the sum of squares of the stage's gradients, float64."""

    @abstractmethod
    def step(self, clip_grad: float, total_norm: float) -> None:
        """Clip by the norm over all modules, and step."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes, in float32: parameters, moments, steps; collective."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read the stage from a checkpoint; raises if a tensor is missing or damaged."""


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def adam_of(parameters: Iterable[Tensor], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Torch's AdamW; as megatron-core's, it decays matrices only. A group has whole tensors, or those of one mesh."""
    groups: dict[tuple[bool, int], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 0
            groups.setdefault((parameter.dim() > 1, ranks), []).append(parameter)
    rows = [
        {"params": same, "weight_decay": settings.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), same in groups.items()
    ]
    return torch.optim.AdamW(
        rows or [{"params": []}], lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon
    )


def clip_gradients(parameters: Iterable[Parameter], clip_grad: float, total_norm: float) -> None:
    """Scale gradients to a norm over all modules of at most ``clip_grad`` (0: none)."""
    factor = clip_grad / (total_norm + NORM_EPSILON)
    if clip_grad and factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)


def global_norm(
    stages: Mapping[tuple[int, int], LearningStage],
    device: torch.device,
    other: torch.Tensor | float = 0.0,
) -> float:
    """Norm of all modules' gradients, with a square ``other``, which nan makes nan on all ranks; collective."""
    square = torch.zeros((), dtype=torch.float64, device=device) + other
    for trained in stages.values():
        square += trained.gradient_square().to(device)
    dist.all_reduce(square)
    return float(square.sqrt())
