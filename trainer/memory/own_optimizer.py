"""Optimizers of anybody's own: found by their names, tried on a few numbers, refused where they could not be exact."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import RecipeError, nearest, require
from trainer.recipe import TORCH, Memory, Optim
from trainer.system.imports import imported

TRIED_STEPS = 3


def make_own(groups: Any, optim: Optim) -> Optimizer:
    """The optimizer that ``optim.name`` or ``optim.factory`` stands for, over ``groups``. A ``RecipeError`` if there is
    no such class, it does not take its arguments, or ignores a decay."""
    make, called = _maker(optim), describe_own(optim)
    try:
        made = make(groups, lr=optim.lr, **optim.arguments)
    except Exception as error:  # whatever the user's own code raises
        names = list(inspect.signature(make).parameters)
        unknown = [name for name in optim.arguments if name not in names]
        meant = [near for name in unknown for near in get_close_matches(name, names, 1, 0.5)]
        hint = f"; did you mean {', '.join(meant)}?" if meant else ""
        text = f"{called} with optim.arguments={dict(optim.arguments)}: {type(error).__name__}: {error}{hint}"
        raise RecipeError(text) from error
    require(isinstance(made, Optimizer), f"{called} gives a {type(made).__name__}, not a torch.optim.Optimizer")
    decays = any(group.get("weight_decay") for group in made.param_groups)
    why = f"{called} knows no weight_decay: leave optim.weight_decay at 0, and out of optim.groups"
    require(not decays or "weight_decay" in made.defaults, why)
    return made


def describe_own(optim: Optim) -> str:
    """What the recipe calls it."""
    return f"optim.{'name' if optim.factory is None else 'factory'}={optim.kind}"


def _maker(optim: Optim) -> Callable[..., Any]:
    if optim.factory is not None:
        return optim.factory
    last = optim.name.rpartition(".")[2]
    given = f"optim.name={optim.name}"
    if optim.name.startswith(TORCH):
        kinds = {name: kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind)}
        meant = nearest(last, kinds, 0.5, TORCH) or f"; there are {', '.join(sorted(kinds))}"
        require(last in kinds, f"{given} is no optimizer of this torch{meant}")
        kind: Any = kinds[last]
    else:
        kind = imported(given, optim.name)
        require(callable(kind), f"{given} is neither a class nor a function that makes an optimizer")
    if _is_optimizer(kind):
        closure = inspect.signature(kind.step).parameters.get("closure")
        needs = closure is not None and closure.default is inspect.Parameter.empty
        why = f"{given} calls forward and backward by itself (a closure), which a step here has had before: use adamw"
        require(not needs, why)
    return kind


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer


@dataclass(frozen=True)
class _Found:
    """What an optimizer was found to do in a few steps on two small matrices."""

    one_by_one: bool  # parameters may be updated one after the other: none reads another
    by_element: bool  # and in shards: no number reads another
    moments: int  # tensors of a weight's size that it keeps of each
    hidden: tuple[str, ...]  # what changes outside of the state of its parameters, where no checkpoint looks


def trial_of(optim: Optim) -> _Found:
    """Try it. It draws no number from torch's generator that a run would miss."""
    arguments = repr(sorted(optim.arguments.items(), key=str))
    try:
        return _trial(optim.name, optim.factory, optim.lr, arguments, _Held(optim))
    except RecipeError:
        raise
    except Exception as error:  # whatever the user's own code raises
        why = f"{describe_own(optim)} fails in a trial on two small matrices"
        raise RecipeError(f"{why}: {type(error).__name__}: {error}") from error


class _Held:
    """Arguments that cannot be hashed, and are described beside."""

    def __init__(self, optim: Optim) -> None:
        self.optim = optim

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache
def _trial(name: str, factory: Any, lr: float, arguments: str, held: _Held) -> _Found:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    weights = [draw(shape) for shape in ((4, 6), (3, 5))]
    slopes = [[draw(weight.shape) for weight in weights] for _ in range(TRIED_STEPS)]
    with torch.random.fork_rng(devices=[]):
        whole = [weight.clone().requires_grad_() for weight in weights]
        optimizer = make_own(_group(whole, held.optim), held.optim)
        before = _outside(optimizer)
        _take(optimizer, whole, slopes[:-1])
        again = [weight.detach().clone().requires_grad_() for weight in whole]
        resumed = make_own(_group(again, held.optim), held.optim)
        resumed.state.update(
            {new: copy.deepcopy(optimizer.state.get(old, {})) for old, new in zip(whole, again, strict=True)}
        )
        for one, parameters in ((optimizer, whole), (resumed, again)):
            torch.default_generator.manual_seed(0)
            _take(one, parameters, slopes[-1:])
        goes_on = all(map(torch.equal, again, whole))
        changed = sorted(key for key, value in _outside(optimizer).items() if before.get(key) != value)
        # A private attribute may hold what every step computes anew; of others nobody knows what later steps do.
        hidden = tuple(key for key in changed if not (goes_on and key[0] == "_")) or (() if goes_on else ("something",))
        values = optimizer.state.get(whole[0], {}).values()
        moments = sum(isinstance(value, Tensor) and value.shape == whole[0].shape for value in values)

        alone = [weight.clone().requires_grad_() for weight in weights]
        shown = make_own(_group(alone, held.optim), held.optim)
        (group,) = shown.param_groups
        for step in slopes:
            for parameter, slope in zip(alone, step, strict=True):
                parameter.grad = slope.clone()
                shown.param_groups = [{**group, "params": [parameter]}]
                shown.step()
                parameter.grad = None

        cut = [weight[rows].clone().requires_grad_() for weight in weights for rows in (slice(0, 2), slice(2, None))]
        parts = [[slope[rows] for slope in step for rows in (slice(0, 2), slice(2, None))] for step in slopes]
        _take(make_own(_group(cut, held.optim), held.optim), cut, parts)
    joined = [torch.cat(cut[at : at + 2]) for at in (0, 2)]
    one_by_one = all(map(torch.allclose, alone, whole))
    return _Found(one_by_one, one_by_one and all(map(torch.allclose, joined, whole)), moments, hidden)


def _group(parameters: Sequence[Tensor], optim: Optim) -> list[dict[str, Any]]:
    return [{"params": list(parameters), "weight_decay": optim.weight_decay, "lr": optim.lr, "lr_scale": 1.0}]


def _take(optimizer: Optimizer, parameters: Sequence[Tensor], slopes: Sequence[Sequence[Tensor]]) -> None:
    for step in slopes:
        for parameter, slope in zip(parameters, step, strict=True):
            parameter.grad = slope.clone()
        optimizer.step()


def _outside(optimizer: Optimizer) -> dict[str, str]:
    """All that an optimizer has, but for the state of its parameters and what every optimizer of torch has."""
    found = {f"param_groups.{key}": value for key, value in optimizer.param_groups[0].items() if key != "params"}
    usual = vars(torch.optim.Adam([torch.zeros(())], fused=True))
    found |= {key: value for key, value in vars(optimizer).items() if key not in usual and not callable(value)}
    found |= {f"state[{key!r}]": value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    inner = {key: value.state for key, value in found.items() if isinstance(value, Optimizer)}  # of one that it wraps
    found |= {f"{key}.state": state for key, state in inner.items() if state is not optimizer.state}
    return {key: repr(copy.copy(value)) for key, value in found.items() if key not in inner}


def own_refusals(optim: Optim, memory: Memory) -> Iterator[str]:
    """What an optimizer of one's own cannot go with, as its trial has shown."""
    called, tried = describe_own(optim), trial_of(optim)
    if tried.hidden:
        yield (
            f"{called} keeps {', '.join(tried.hidden)} outside of the state of its parameters, which no checkpoint "
            "has: keep it in self.state[parameter]"
        )
    for key, is_on in (
        ("memory.strategy=fsdp", memory.strategy == "fsdp" or memory.cpu_offload == "parameters"),
        (f"memory.tensor_parallel={memory.tensor_parallel}", memory.tensor_parallel > 1),
    ):
        if is_on and not tried.by_element:
            yield f"{called} needs whole tensors (its trial on halves differs), and {key} has parts of them: use adamw"
    for key, is_on in (
        ("memory.optimizer_in_backward", bool(memory.optimizer_in_backward)),
        (f"memory.cpu_offload={memory.cpu_offload}", memory.cpu_offload != "none"),
    ):
        if is_on and not tried.one_by_one:
            yield f"{called} reads several parameters for one, and {key} updates one after the other: use adamw"
    if memory.precision == "16-true" and memory.cpu_offload != "optimizer":
        yield f"memory.precision=16-true is not known to be right with {called}: use bf16-true or 16-mixed"
