"""The optimizer: its implementation, and updates during the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.engine.memory_rehearsal import init_optimizer_state
from trainer.engine.sync import GradientSync
from trainer.errors import require, require_package
from trainer.memory.custom_optimizer import build_custom_optimizer
from trainer.memory.muon import Muon
from trainer.memory.parameter_groups import UpdateRule, to_param_groups, update_rule_for
from trainer.memory.sharding import local_shard
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
    parameters: Sequence[Tensor] | Mapping[Tensor, UpdateRule],
    optim: Optim,
    memory: Memory,
    device: torch.device,
    fused: bool = True,
) -> Optimizer:
    """Build the optimizer over ``parameters``: those that train, sharded already, or their masters in host memory.

    A mapping gives the update rule of each. Otherwise the shape decides whether a parameter decays. ``fused`` uses
    torch's fused kernels if available, which support no complex parameters and no sparse gradients. On a CPU they round
    the last elements of a tensor differently, so an update depends on the position in its shard.
    """
    require(bool(parameters), "every parameter is frozen: raise model.train_last_blocks, or change optim.groups")
    if not isinstance(parameters, Mapping):
        parameters = {p: update_rule_for(p, optim, matrix=p if p.ndim == 2 else None) for p in parameters}
    fused = fused and _has_fused_kernel("adamw" if optim.name == "muon" else optim.kind, device, list(parameters))
    optimizer = _optimizer_of(parameters, optim, memory, device, fused)
    return OptimizerInBackward(optimizer) if memory.optimizer_in_backward else optimizer


def _optimizer_of(
    rules: Mapping[Tensor, UpdateRule], optim: Optim, memory: Memory, device: torch.device, fused: bool
) -> Optimizer:
    groups: Any = to_param_groups(rules, optim.lr)
    if memory.optimizer_state_bits < 32 or memory.stochastic_rounding:
        key = "stochastic_rounding" if memory.stochastic_rounding else "optimizer_state_bits"
        require_package(f"memory.{key}={getattr(memory, key)}", "torchao", "lean")
        from trainer.memory.low_bit_adam import lean_adam

        return lean_adam(groups, optim, memory, device, **explicit_adam_settings(optim))
    if optim.is_custom:
        return build_custom_optimizer(groups, optim)
    if optim.name == "lion":
        require_package("optim.name=lion", "timm", "lean")
        from timm.optim.lion import Lion

        return Lion(groups, lr=optim.lr, **explicit_adam_settings(optim))
    options: dict[str, Any] = {"momentum": optim.momentum, "nesterov": optim.nesterov} if optim.momentum else {}
    if optim.name == "rmsprop":
        options.pop("nesterov", None)
    options |= explicit_adam_settings(optim)
    # Fused kernels unscale fp16 gradients during the update, when it is too late to clip them.
    if fused and memory.precision != "16-mixed":
        options["fused"] = True
    if optim.name == "muon":
        return Muon(rules, optim, **options)
    return OPTIMIZERS[optim.kind](groups, lr=optim.lr, **options)  # type: ignore[call-arg]


def explicit_adam_settings(optim: Optim) -> dict[str, Any]:
    betas = {} if optim.betas is None else {"betas": tuple(optim.betas)}
    return betas | ({} if optim.eps is None else {"eps": optim.eps})


def _has_fused_kernel(name: str, device: torch.device, parameters: Sequence[Tensor]) -> bool:
    if not all(p.is_floating_point() for p in parameters):
        return False
    if any(isinstance(p, DTensor) for p in parameters):  # DTensor supports the kernels of these two only
        return name in ("adamw", "adam")
    return name in ("adamw", "adam", "sgd") or (name == "adagrad" and device.type == "cpu")


class OptimizerInBackward(Optimizer):
    """Splits ``optimizer`` so that backward updates one parameter at a time and frees its gradient.

    ``step`` does nothing. Groups and state are shared with ``optimizer``, which must not be used afterwards. The result
    is the same if every backward is a step, nothing needs all gradients at once (no accumulation, clipping or skipped
    steps), and the update of a parameter reads no other parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.state = optimizer, optimizer.state
        first = self.param_groups[0]["params"][0]  # FSDP shards every parameter, over the same ranks
        kinds = first.placements if isinstance(first, DTensor) else ()
        # The groups of ranks with the other shards, without replicas of hybrid sharding.
        self.shard_groups = [first.device_mesh.get_group(at) for at, kind in enumerate(kinds) if kind.is_shard()]
        self.device = first.device
        self.forget_norms()
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                GradientSync.on_gradient(parameter, self._update, number)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No-op: the weights were updated in the backward."""

    def init_state(self) -> None:
        """Create the optimizer's state by a step of length 0, one parameter at a time."""
        self.optimizer.state = self.state
        for group in self.param_groups:
            for parameter in group["params"]:
                self.optimizer.param_groups = [{**group, "params": [parameter]}]
                init_optimizer_state(self.optimizer)

    def forget_norms(self) -> None:
        """Start to record the gradient norms of the next step."""
        self.norms: list[Tensor] = []

    def norm(self) -> Tensor:
        """Return the global gradient norm since ``forget_norms``: a scalar on the device, the same on all ranks."""
        squares = torch.stack(self.norms).square().sum() if self.norms else torch.zeros((), device=self.device)
        for group in self.shard_groups:
            torch.distributed.all_reduce(squares, group=group)
        return squares.sqrt()

    def _update(self, number: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # FSDP also calls the hooks of parameters without a gradient
            return
        self._record_norm(parameter.grad)
        # One optimizer updates all parameters: it sees only this parameter, with the group's current settings.
        self.optimizer.param_groups = [{**self.param_groups[number], "params": [parameter]}]
        self.optimizer.state = self.state
        self.optimizer.step()
        parameter.grad = None

    def _record_norm(self, gradient: Tensor) -> None:
        part = local_shard(gradient)
        if part.is_cuda:  # FSDP may have allocated it on another stream: its memory must not be reused too early
            part.record_stream(torch.cuda.current_stream(part.device))
        self.norms.append(torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)))


class UpdateInBackwardSync(GradientSync):
    """Gradient sync for updates in backward: when the norm is known, weights are updated and no step can be skipped."""

    updates_in_backward = True

    def __init__(self, optimizer: OptimizerInBackward) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]])
        self.optimizer = optimizer

    def before_forward(self, is_last: bool) -> None:
        self.optimizer.forget_norms()

    def norm(self) -> Tensor:
        return self.optimizer.norm()
