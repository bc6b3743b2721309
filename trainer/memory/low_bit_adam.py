"""Adam and AdamW of torchao: 8-bit or 4-bit state, and stochastic rounding of bfloat16 weights. Requires torchao."""

from __future__ import annotations

import shutil
from functools import lru_cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.optim import Optimizer
from torchao import optim as torchao
from torchao.optim.adam import single_param_adam

from trainer.engine.order import derive_seed
from trainer.memory.sharding import local_shard
from trainer.recipe import Memory, Optim

KINDS = {  # torchao has no 32-bit Adam: its AdamW is configured as one
    "adamw": {32: torchao._AdamW, 8: torchao.AdamW8bit, 4: torchao.AdamW4bit},
    "adam": {32: torchao._AdamW, 8: torchao.Adam8bit, 4: torchao.Adam4bit},
}


def lean_adam(groups: Any, optim: Optim, memory: Memory, device: torch.device, **arguments: Any) -> Optimizer:
    """Build torchao's optimizer for ``memory.optimizer_state_bits`` and ``memory.stochastic_rounding``.

    32-bit state has the dtype of the weights, as in torch. So has the state of tensors with fewer than 4096 values, or
    whose size blocks of 256 (8 bits) or 128 (4 bits) do not divide. The learning rate of a group is a CPU tensor.
    """
    kind = _class(KINDS[optim.name][memory.optimizer_state_bits], can_compile(device))
    optimizer = kind(groups, lr=optim.lr, **arguments, bf16_stochastic_round=memory.stochastic_rounding)
    optimizer.is_adamw = optim.name == "adamw"
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    optimizer.numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return optimizer


def can_compile(device: torch.device) -> bool:
    """Return whether to compile the update: on GPUs, where it saves intermediate tensors, with Triton's C compiler.

    On a CPU compilation would take ten seconds per shape."""
    from torch.utils._triton import has_triton

    return device.type == "cuda" and has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


@lru_cache
def _class(kind: type[Optimizer], compiled: bool) -> Any:
    update = torch.compile(single_param_adam, fullgraph=True, dynamic=False) if compiled else single_param_adam

    class LeanAdam(kind):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            """Take torchao's step, but compile only if it pays, and pass shards as plain tensors."""
            if self.bf16_stochastic_round:
                self._seed()
            with torch._dynamo.utils.disable_cache_limit():  # one compiled update per weight shape
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._update(parameter, group)

        def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_sq"] = self._new_buffer(parameter, False)
            state["step"] += 1
            # The update is elementwise, so it works on this rank's shards. DTensor does not support quantised state.
            weight, gradient = local_shard(parameter.detach()), local_shard(parameter.grad)  # type: ignore[arg-type]
            moments = local_shard(state["exp_avg"]), local_shard(state["exp_avg_sq"])
            settings = group["lr"], *group["betas"], group["weight_decay"], group["eps"], self.is_adamw
            rounds = self.bf16_stochastic_round and parameter.dtype is torch.bfloat16
            update(weight, gradient, state["step"], *moments, None, *settings, rounds)

        def _seed(self) -> None:
            """Seed by step and weight, so that replicas round identically; the engine reseeds in each micro-step."""
            shown = [p for group in self.param_groups for p in group["params"]]  # a single one if updated in backward
            steps = max((int(self.state[p]["step"]) for p in shown if p in self.state), default=0)
            torch.manual_seed(derive_seed(steps, self.numbers[shown[0]]))

    LeanAdam.__name__ = LeanAdam.__qualname__ = kind.__name__
    return LeanAdam
