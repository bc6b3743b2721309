"""The optimizer: which parameters decay, which implementation runs, and whether it updates during the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.engine.sync import GradientSync
from trainer.errors import RecipeError, require_package
from trainer.memory.own_optimizer import make_own
from trainer.memory.parameter_groups import Rule, grouped, rule_of
from trainer.memory.sharding import local
from trainer.recipe import Memory, Optim

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def build_optimizer(
    parameters: Sequence[Tensor] | Mapping[Tensor, Rule],
    optim: Optim,
    memory: Memory,
    device: torch.device,
    fused: bool = True,
) -> Optimizer:
    """The optimizer over the ``parameters`` that train.

    Args:
        parameters: weights, sharded already where they are to be, or their masters in host memory; on ``device``. With
            the rule of each, or without one: then only the shape says whether it decays.
        optim: which optimizer, and its learning rate and decay.
        memory: how many bits its state has, how it rounds, and whether it updates during the backward.
        fused: use torch's fused kernels where there are some; they take no complex parameters and no sparse gradients.
            On a CPU they round the last elements of a tensor otherwise than the others, so that a weight's update
            depends on where it is in its shard.

    Raises:
        RecipeError: when no parameter trains, or the optimizer's package is not installed.
    """
    if not parameters:
        raise RecipeError("every parameter is frozen: raise model.train_last_blocks, or mend optim.groups")
    rules = parameters if isinstance(parameters, Mapping) else {p: rule_of(p, optim) for p in parameters}
    groups = grouped(rules, optim.lr)
    fused = fused and _has_fused_kernel(optim.kind, device, list(rules))
    optimizer = _optimizer_of(groups, optim, memory, device, fused)
    return OptimizerInBackward(optimizer) if memory.optimizer_in_backward else optimizer


def _optimizer_of(groups: Any, optim: Optim, memory: Memory, device: torch.device, fused: bool) -> Optimizer:
    if memory.optimizer_state_bits < 32 or memory.stochastic_rounding:
        key = "stochastic_rounding" if memory.stochastic_rounding else "optimizer_state_bits"
        require_package(f"memory.{key}={getattr(memory, key)}", "torchao", "lean")
        from trainer.memory.lean_adam import lean_adam

        return lean_adam(groups, optim, memory, device, **given(optim))
    if optim.is_custom:
        return make_own(groups, optim)
    if optim.name == "lion":
        require_package("optim.name=lion", "timm", "lean")
        from timm.optim.lion import Lion

        return Lion(groups, lr=optim.lr, **given(optim))
    options: dict[str, Any] = {"momentum": optim.momentum, "nesterov": optim.nesterov} if optim.momentum else {}
    if optim.name == "rmsprop":
        options.pop("nesterov", None)
    options |= given(optim)
    # Fused kernels want to unscale fp16 gradients themselves, which clipping comes too late for.
    if fused and memory.precision != "16-mixed":
        options["fused"] = True
    return OPTIMIZERS[optim.kind](groups, lr=optim.lr, **options)  # type: ignore[call-arg]


def given(optim: Optim) -> dict[str, Any]:
    """The betas and the epsilon, where they are not left to the optimizer."""
    betas = {} if optim.betas is None else {"betas": tuple(optim.betas)}
    return betas | ({} if optim.eps is None else {"eps": optim.eps})


def _has_fused_kernel(name: str, device: torch.device, parameters: Sequence[Tensor]) -> bool:
    if not all(p.is_floating_point() for p in parameters):
        return False
    if any(isinstance(p, DTensor) for p in parameters):  # DTensor knows the kernels of these two only
        return name in ("adamw", "adam")
    return name in ("adamw", "adam", "sgd") or (name == "adagrad" and device.type == "cpu")


class OptimizerInBackward(Optimizer):
    """``optimizer``, taken apart: backward updates one parameter after the other and frees its gradient.

    ``step`` does nothing, for the last backward has done it all; the groups and the state are those of ``optimizer``,
    so schedulers and checkpoints see no difference. The result is the same, as long as every backward is a step and
    nothing needs all gradients at once (no accumulation, no clipping, no skipped steps).

    The update of a parameter must read no other one. ``optimizer`` is used up.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.state = optimizer, optimizer.state
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.device = parameters[0].device
        self.shard_groups = next((_shard_groups(p) for p in parameters if isinstance(p, DTensor)), [])
        self.forget_norms()
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                GradientSync.on_gradient(parameter, self._update, number)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the weights were updated in the backward."""

    def make_state(self) -> None:
        """Let the optimizer make its state, by a step of length 0 for one parameter after the other."""
        for number, group in enumerate(self.param_groups):
            rate = group["lr"]
            group["lr"] = rate * 0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
                self._update(number, parameter)
            group["lr"] = rate
        self.forget_norms()

    def forget_norms(self) -> None:
        """Begin to record the gradient norms of another step."""
        self.norms: list[Tensor] = []
        self.shard_norms: list[Tensor] = []

    def norm(self) -> Tensor:
        """The global norm of the gradients since ``forget_norms``: a scalar, the same on all ranks, on the device."""
        squares = self._square_sum(self.shard_norms)
        for group in self.shard_groups:
            torch.distributed.all_reduce(squares, group=group)
        return (squares + self._square_sum(self.norms)).sqrt()

    def _update(self, number: int, parameter: Tensor) -> None:
        """Step ``parameter``, which is of group ``number``, and free its gradient."""
        if parameter.grad is None:  # FSDP calls the hooks of parameters that got none, too
            return
        self._record_norm(parameter.grad)
        # One optimizer does them all in turn: it is shown this parameter alone, with what the schedule says now.
        self.optimizer.param_groups = [{**self.param_groups[number], "params": [parameter]}]
        self.optimizer.state = self.state
        self.optimizer.step()
        parameter.grad = None

    def _record_norm(self, gradient: Tensor) -> None:
        part = local(gradient)
        if part.is_cuda:  # FSDP may have made it on another stream than this one: its memory must wait for this one
            part.record_stream(torch.cuda.current_stream(part.device))
        norm = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
        (self.shard_norms if isinstance(gradient, DTensor) else self.norms).append(norm)

    def _square_sum(self, norms: list[Tensor]) -> Tensor:
        return torch.stack(norms).square().sum() if norms else torch.zeros((), device=self.device)


class AppliedInBackward(GradientSync):
    """Gradients are gone when their norm is known, and the weights updated: a step cannot be skipped."""

    applied = True

    def __init__(self, optimizer: OptimizerInBackward) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]])
        self.optimizer = optimizer

    def before(self, is_last: bool) -> None:
        self.optimizer.forget_norms()

    def norm(self) -> Tensor:
        return self.optimizer.norm()


def _shard_groups(parameter: DTensor) -> list[Any]:
    """The ranks that hold the other shards of ``parameter``; not those with its replicas in hybrid sharding."""
    mesh = parameter.device_mesh
    return [mesh.get_group(at) for at, placement in enumerate(parameter.placements) if placement.is_shard()]
