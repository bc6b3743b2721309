"""What the checks look at, the recipe with its data and what follows from it, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from torch import nn

from trainer.contract import Streamable, capability, without_weights
from trainer.errors import RecipeError, RunError
from trainer.launching.world import World
from trainer.memory.own_optimizer import trial_of
from trainer.memory.parameter_groups import choose_trained
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.precision import weights_dtype
from trainer.planner.knobs import wants_plan
from trainer.recipe import Recipe
from trainer.system.redact import redact, redact_value
from trainer.system.reports import cause
from trainer.system.text import escaped
from trainer.weights.streaming import on_meta

Status = Literal["ok", "warning", "FAIL", "skipped"]

STATE_TENSORS = {"adamw": 2, "adam": 2, "rmsprop": 1, "adagrad": 1, "lion": 1}
"""Tensors of a weight's size that an optimizer keeps of it; those of sgd depend on its momentum."""


@dataclass
class Subject:
    """A recipe that ``source`` names, and the ranks that were asked for; once ``ready``, both are prepared."""

    recipe: Recipe
    source: str
    world: World
    ready: bool = False

    @property
    def run_dir(self) -> Path:
        """Where the run would write; without ``run.dir``, where it would make its directory."""
        return Path(self.recipe.run.dir or f"runs/{Path(self.source).stem}").absolute()

    @cached_property
    def disk(self) -> Path:
        """The run directory, or the nearest folder above it that is there."""
        return next(path for path in (self.run_dir, *self.run_dir.parents) if path.is_dir())

    @cached_property
    def module(self) -> nn.Module:
        """The model, without memory for its weights; only when ``ready``."""
        module = on_meta(without_weights(self.recipe.model).build)
        choose_trained(module, self.recipe.model, self.recipe.optim)
        return module

    @cached_property
    def plan(self) -> Plan | None:
        """How the run would use memory; ``None`` where the planner is still to decide that."""
        return None if wants_plan(self.recipe) else decide_plan(self.recipe, self.world.size)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: weights that no file has, buffers and the optimizer's state."""
        return self._bytes(capability(self.recipe.model, Streamable).in_base(self.module))

    @cached_property
    def state_bytes(self) -> int:
        """The same with all weights, as the run holds them."""
        return self._bytes()

    def _bytes(self, left_out: Collection[str] = ()) -> int:
        optim, memory = self.recipe.optim, self.recipe.memory
        dtype = weights_dtype(memory)
        tensors = trial_of(optim).moments if optim.is_custom else STATE_TENSORS.get(optim.kind, 0)
        tensors += optim.name in ("sgd", "rmsprop") and optim.momentum > 0
        total = sum(buffer.nbytes for buffer in self.module.buffers())
        for name, parameter in self.module.named_parameters():
            if name in left_out:
                continue
            codes = not (parameter.is_floating_point() or parameter.is_complex())
            width = parameter.element_size() if dtype is None or codes else dtype.itemsize
            state = tensors * width * memory.optimizer_state_bits / 32 if parameter.requires_grad else 0
            average = max(4, width) if parameter.requires_grad and optim.ema is not None else 0
            total += int(parameter.numel() * (width + state + average))
        return total


@dataclass(frozen=True)
class Finding:
    """One line: of what may go wrong (warning), will (FAIL), could not be examined (skipped), or ok. ``check`` is what
    was examined, by default the name of the check. A :class:`RecipeError` has its ``fix`` within."""

    status: Status
    text: str
    fix: str = ""
    check: str = ""

    def line(self) -> str:
        """For a person, without secrets."""
        line = f"{self.status:<8} {self.check:<18} {self.text}" + (f"; fix: {self.fix}" if self.fix else "")
        return escaped(redact(line))

    def to_json(self) -> dict[str, str]:
        """For a program, without secrets."""
        return redact_value({"check": self.check, **asdict(self)})


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
fail = partial(Finding, "FAIL")
skipped = partial(Finding, "skipped")


def findings(check: str, look: Callable[[], Finding | Iterator[Finding]]) -> Iterator[Finding]:
    """What ``look`` finds, one or several; an error that it ends with is a finding, too."""
    try:
        found = look()
        for one in [found] if isinstance(found, Finding) else found:
            yield one if one.check else replace(one, check=check)
    except (RecipeError, RunError) as error:
        yield fail(cause(error), check=check)
    except (Exception, SystemExit) as error:
        why = f"the check ended with {cause(error)}"
        yield fail(why, "if the run starts all the same, report this", check)
