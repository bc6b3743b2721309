"""Restore what a trial forward changes in a module, in its model and in random generators; BatchNorm statistics."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainer.contract import Model

CONTAINERS = (dict, defaultdict, Counter, list, set, deque)
STATEFUL = ((random.Random, "state"), (torch.Generator, "_state"), (np.random.RandomState, "_state"))
LARGE = 2**20  # min elements of a parameter not copied in advance: forwards rarely write to parameters
UNDECLARED = ("running_mean", "running_var")  # written by batch_norm, but not declared in its schema


class ModelState(TorchDispatchMode):
    """The state of ``module``, ``model`` and random generators before a trial.

    It covers attributes of the model, the module and its submodules, and the content of lists, dicts, sets, tensors and
    random generators; not hooks, other objects or global variables. While this mode is active, a tensor is copied
    before an operation writes to it. With ``frozen``, the write is undone at once.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise flex_attention, which compiles itself, fails

    def __init__(self, module: nn.Module, model: Model, generator: torch.Generator) -> None:
        super().__init__()
        self.frozen = self.mixes_samples = False
        self.modes = [(part, part.training) for part in module.modules()]
        found: list[Any] = [vars(part) for part in (*module.modules(), model)]
        inside = [value for names in found for name, value in names.items() if "hooks" not in name]
        found += [value for value in inside if type(value) in CONTAINERS]
        self.containers = [(one, copy.copy(one)) for one in found]
        values = [value for one in found for value in (one.values() if isinstance(one, dict) else one)]
        values += [*module.parameters(), *module.buffers()]  # includes those of TorchScript modules
        self.tensors = [value for value in values if isinstance(value, Tensor)]
        plain = [(one, _storage(one)) for one in self.tensors if not isinstance(one, DTensor)]  # FSDP moves its shards
        self.data = [(one, one.data, storage) for one, storage in plain if storage is not None]
        self.held = {storage._cdata for _, _, storage in self.data}
        self.copies: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}  # in host memory
        bits = [value.bit_generator for value in values if isinstance(value, np.random.Generator)]
        self.generators: list[tuple[Any, Any]] = [(partial(setattr, one, "state"), one.state) for one in bits]
        for one in (random._inst, np.random.mtrand._rand, torch.default_generator, generator, *values):
            for name in (name for kind, name in STATEFUL if isinstance(one, kind)):
                self.generators.append((getattr(one, f"set{name}"), getattr(one, f"get{name}")()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = self._written(func, args, kwargs or {})
        self.copy(written)
        result = func(*args, **kwargs or {})
        for storage in written if self.frozen else ():
            storage.copy_(self.copies[storage._cdata][1])
        return result

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[UntypedStorage]:
        """Return the storages of this state or of parameters (by type: FSDP makes new ones) that ``func`` writes to."""
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        normalises = schema is not None and "batch_norm" in schema.name
        if schema is None or not (schema.is_mutable or normalises):
            return []
        given = dict(zip([one.name for one in schema.arguments], args, strict=False)) | kwargs
        # InstanceNorm uses statistics per sample. It arrives here with all samples in one row, so the length is 1.
        self.mixes_samples |= bool(normalises and given.get("training") and len(given["input"]) > 1)
        names = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        leaves = tree_leaves([given.get(name) for name in names.union(UNDECLARED)])
        found = [(leaf, _storage(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        return [s for leaf, s in found if s is not None and (s._cdata in self.held or isinstance(leaf, nn.Parameter))]

    def copy(self, storages: Iterable[UntypedStorage]) -> None:
        with _disable_current_modes():  # a plan on a CPU has real buffers, and its fake mode cannot copy storages
            for one in storages:
                if one._cdata not in self.copies and one.device.type != "meta":
                    self.copies[one._cdata] = one, one.clone() if one.device.type == "cpu" else one.cpu()

    def copy_small(self) -> None:
        """Copy buffers and small parameters in advance, for a trial without this mode."""
        small = [one for one in self.tensors if not isinstance(one, nn.Parameter) or one.numel() < LARGE]
        self.copy(filter(None, map(_storage, small)))

    def restore(self, generators: bool = True) -> None:
        for part, training in self.modes:
            part.training = training
        for one, before in self.containers:
            if isinstance(one, dict):
                dict.update(one, before)
                for key in one.keys() - before.keys():
                    del one[key]
            else:
                one.clear()
                (one.update if isinstance(one, set) else one.extend)(before)
        for tensor, data, storage in self.data:
            now = _storage(tensor)
            if now is not None and now._cdata != storage._cdata:  # the forward assigned to tensor.data
                tensor.data = data
        with _disable_current_modes():
            for storage, content in self.copies.values():
                if storage.nbytes():  # otherwise FSDP has freed it
                    storage.copy_(content)
        self.copies.clear()
        for put, state in self.generators if generators else ():
            put(state)


def _storage(tensor: Tensor) -> UntypedStorage | None:
    """Return the storage of ``tensor`` or of its local shard; ``None`` for sparse and other composed tensors."""
    try:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


class BatchNormStatistics:
    """Makes k micro-steps move the running statistics exactly as far as one step over the whole batch.

    Each update keeps a share (1 - m) of the running mean. With k updates per step, the momentum
    m' = 1 - (1 - m)^(1/k) keeps (1 - m')^k = 1 - m per step, as in the whole-batch run. Activations are still
    normalised with the statistics of their micro-batch; accumulation cannot change that. Without BatchNorm layers in
    ``module``, all methods do nothing.
    """

    def __init__(self, module: nn.Module, correct_momentum: bool | None = None) -> None:
        self.correct_momentum = correct_momentum
        self.layers = [(layer, layer.momentum) for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self.before: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for layer, _ in self.layers for buffer in layer.buffers()]

    def set_momentum(self, micro_steps: int, is_empty: bool) -> None:
        """Set the momentum for one of ``micro_steps``; an empty one must not change the statistics."""
        for layer, momentum in self.layers:
            if is_empty:
                layer.momentum = 0.0
            elif momentum is None or self.correct_momentum is False:  # None is a cumulative average: it needs none
                layer.momentum = momentum
            else:
                layer.momentum = 1 - (1 - momentum) ** (1 / micro_steps)

    def save(self) -> None:
        self.before = [buffer.clone() for buffer in self.buffers]

    def restore(self) -> None:
        for buffer, value in zip(self.buffers, self.before, strict=True):
            buffer.copy_(value)

    def broadcast(self) -> None:
        """Broadcast the statistics of the first rank, as DDP does before a forward, so that evaluations agree."""
        for buffer in self.buffers:
            torch.distributed.broadcast(buffer, 0)
