"""User-defined optimizers: found by name, tried on small matrices, and rejected where they would not be exact."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import RecipeError, closest_names, require, suggest_name
from trainer.memory.knobs import KNOBS
from trainer.recipe import TORCH_OPTIM_PREFIX, Memory, Optim
from trainer.system.error_reports import describe_error
from trainer.system.imports import import_object
from trainer.system.text import as_text

TRIED_STEPS = 3
_trials: dict[tuple[Any, ...], _OptimizerTraits] = {}  # a process decides several plans for one optimizer


def build_custom_optimizer(groups: Any, optim: Optim) -> Optimizer:
    """Build the optimizer that ``optim.name`` or ``optim.factory`` specifies, over ``groups``, or reject it."""
    make, called = _maker(optim), describe_custom_optimizer(optim)
    try:
        made = make(groups, lr=optim.lr, **optim.arguments)
    except Exception as error:  # user code can raise anything
        names = list(inspect.signature(make).parameters)
        unknown = [name for name in optim.arguments if name not in names]
        close = [near for name in unknown for near in closest_names(name, names, 0.5)]
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        where = f"{called} with optim.arguments={dict(optim.arguments)}"
        raise RecipeError(f"{where}: {describe_error(error)}{hint}") from error
    require(isinstance(made, Optimizer), f"{called} returns a {type(made).__name__}, not a torch.optim.Optimizer")
    fits = "weight_decay" in made.defaults or not any(group.get("weight_decay") for group in made.param_groups)
    require(fits, f"{called} does not support weight_decay: leave optim.weight_decay at 0, and out of optim.groups")
    return made


def describe_custom_optimizer(optim: Optim) -> str:
    """Return the optimizer's setting in the recipe, for messages."""
    return f"optim.{'name' if optim.factory is None else 'factory'}={optim.kind}"


def _maker(optim: Optim) -> Callable[..., Any]:
    if optim.factory is not None:
        return optim.factory
    last = optim.name.rpartition(".")[2]
    given = f"optim.name={optim.name}"
    if optim.name.startswith(TORCH_OPTIM_PREFIX):
        kinds = {name: kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind)}
        hint = suggest_name(last, kinds, 0.5, TORCH_OPTIM_PREFIX) or f"; available: {', '.join(sorted(kinds))}"
        require(last in kinds, f"{given} is not an optimizer of this torch{hint}")
        kind: Any = kinds[last]
    else:
        kind = import_object(given, optim.name)
        require(callable(kind), f"{given} is neither a class nor a function that returns an optimizer")
    if _is_optimizer(kind):
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise RecipeError(f"{given} needs a closure, but the trainer runs forward and backward itself: use adamw")
    return kind


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer


@dataclass(frozen=True)
class _OptimizerTraits:
    """The properties of an optimizer, observed in a few steps on two small matrices."""

    per_parameter: bool  # parameters can be updated one at a time: no update reads another parameter
    elementwise: bool  # parameters can also be sharded: no update reads another element
    hidden_state: tuple[str, ...]  # what changes outside the state of the parameters, which checkpoints do not contain


def probe_optimizer(optim: Optim) -> _OptimizerTraits:
    """Return how the optimizer acts on two small matrices: once per process, without effect on the random generator."""
    key = optim.name, optim.factory, optim.lr, repr(sorted(optim.arguments.items(), key=str))
    try:
        if key not in _trials:
            _trials[key] = _trial(optim)
        return _trials[key]
    except RecipeError:
        raise
    except Exception as error:  # user code can raise anything
        given = f" with optim.arguments={dict(optim.arguments)}" if optim.arguments else ""
        cause = f"{describe_custom_optimizer(optim)}{given} fails in a trial on two small matrices"
        raise RecipeError(f"{cause}: {describe_error(error)}") from error


def _trial(optim: Optim) -> _OptimizerTraits:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = [draw(shape) for shape in ((4, 6), (3, 5))]
    slopes = [[draw(weight.shape) for weight in weights] for _ in range(TRIED_STEPS)]
    with torch.random.fork_rng(devices=[]):
        whole, optimizer = _start(weights, optim)
        before = _outside(optimizer)
        _take(optimizer, whole, slopes[:-1])
        again, resumed = _start(whole, optim)
        resumed.state.update({b: copy.deepcopy(optimizer.state.get(a, {})) for a, b in zip(whole, again, strict=True)})
        for one, parameters in ((optimizer, whole), (resumed, again)):
            torch.default_generator.manual_seed(0)
            _take(one, parameters, slopes[-1:])
        goes_on = all(map(torch.equal, again, whole))
        changed = sorted(key for key, value in _outside(optimizer).items() if before.get(key) != value)
        # A private attribute may be recomputed in every step. Others that change may influence later steps.
        hidden = tuple(key for key in changed if not (goes_on and key[0] == "_")) or (() if goes_on else ("something",))

        alone, shown = _start(weights, optim)
        (group,) = shown.param_groups
        for step in slopes:
            for parameter, slope in zip(alone, step, strict=True):
                parameter.grad = slope.clone()
                shown.param_groups = [{**group, "params": [parameter]}]
                shown.step()
                parameter.grad = None

        halves = slice(0, 2), slice(2, None)
        cut, of_halves = _start([weight[rows] for weight in weights for rows in halves], optim)
        _take(of_halves, cut, [[slope[rows] for slope in step for rows in halves] for step in slopes])
    joined = [torch.cat(cut[at : at + 2]) for at in (0, 2)]
    one_by_one = all(map(torch.allclose, alone, whole))
    return _OptimizerTraits(one_by_one, one_by_one and all(map(torch.allclose, joined, whole)), hidden)


def _start(weights: Sequence[Tensor], optim: Optim) -> tuple[list[Tensor], Optimizer]:
    """Return copies of ``weights`` and an optimizer over them."""
    parameters = [weight.detach().clone().requires_grad_() for weight in weights]
    group = {"params": [*parameters], "weight_decay": optim.weight_decay, "lr": optim.lr, "lr_scale": 1.0}
    return parameters, build_custom_optimizer([group], optim)


def _take(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    for step in gradients:
        for parameter, slope in zip(parameters, step, strict=True):
            parameter.grad = slope.clone()
        optimizer.step()


def _outside(optimizer: Optimizer) -> dict[str, str]:
    """Return all attributes of an optimizer except its parameters' state and what every torch optimizer has."""
    found = {f"param_groups.{key}": value for key, value in optimizer.param_groups[0].items() if key != "params"}
    usual = vars(torch.optim.Adam([torch.zeros(())], fused=True))
    found |= {key: value for key, value in vars(optimizer).items() if key not in usual and not callable(value)}
    found |= {f"state[{key!r}]": value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    inner = {key: value.state for key, value in found.items() if isinstance(value, Optimizer)}  # wrapped optimizers
    found |= {f"{key}.state": state for key, state in inner.items() if state is not optimizer.state}
    return {key: repr(copy.copy(value)) for key, value in found.items() if key not in inner}


def custom_optimizer_conflicts(optim: Optim, memory: Memory) -> Iterator[str]:
    """Yield the reasons why a user-defined optimizer cannot be used with ``memory``, found by its trial."""
    called, tried = describe_custom_optimizer(optim), probe_optimizer(optim)
    if tried.hidden_state:
        where = f"{', '.join(tried.hidden_state)} outside the state of its parameters"
        yield f"{called} keeps {where}, which is not saved in checkpoints: keep it in self.state[parameter]"
    for key, is_on in (
        ("memory.strategy=fsdp", memory.strategy == "fsdp" or memory.cpu_offload == "parameters"),
        (f"memory.tensor_parallel={memory.tensor_parallel}", memory.tensor_parallel > 1),
    ):
        if is_on and not tried.elementwise:
            fix = "use muon" if optim.name == "torch.optim.Muon" else "use adamw"
            yield f"{called} needs whole tensors (its trial on halves differs), but {key} splits them: {fix}"
    for knob in KNOBS:
        if knob.one_by_one and knob.is_on(memory) and not tried.per_parameter:
            key = f"memory.{knob.name}={as_text(getattr(memory, knob.name))}"
            yield f"{called} reads several parameters to update one, but {key} updates them one at a time: use adamw"
    if memory.precision == "16-true" and memory.cpu_offload != "optimizer":
        yield f"memory.precision=16-true has not been verified with {called}: use bf16-true or 16-mixed"
