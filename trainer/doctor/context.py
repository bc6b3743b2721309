"""The subject of all checks (recipe, data and derived sizes), and their findings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.contract import Streamable, capability, without_weights
from trainer.engine.memory_rehearsal import init_optimizer_state
from trainer.errors import RecipeError, RunError
from trainer.launching.world import World
from trainer.memory.optimizer import build_optimizer
from trainer.memory.parameter_groups import set_requires_grad
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.precision import weights_dtype
from trainer.planner.knobs import wants_plan
from trainer.recipe import Memory, Optim, Recipe
from trainer.system.error_reports import describe_error
from trainer.system.redact import redact, redact_value
from trainer.system.text import escaped
from trainer.weights.streaming import on_meta

Status = Literal["ok", "warning", "FAIL", "skipped"]


@dataclass
class CheckContext:
    """A recipe with its ``source`` and the detected world; ``ready`` once model and data are prepared."""

    recipe: Recipe
    source: str
    world: World
    ready: bool = False

    @property
    def run_dir(self) -> Path:
        """The run directory; without ``run.dir``, the folder in which the run would create it."""
        return Path(self.recipe.run.dir or f"runs/{Path(self.source).stem}").absolute()

    @cached_property
    def existing_folder(self) -> Path:
        """The run directory, or the nearest existing folder above it."""
        return next(path for path in (self.run_dir, *self.run_dir.parents) if path.is_dir())

    @cached_property
    def module(self) -> nn.Module:
        """The model on the meta device; requires ``ready``."""
        module = on_meta(without_weights(self.recipe.model).build)
        set_requires_grad(module, self.recipe.model, self.recipe.optim)
        return module

    @cached_property
    def plan(self) -> Plan | None:
        """The run's memory plan; ``None`` if the planner will choose it."""
        return None if wants_plan(self.recipe) else decide_plan(self.recipe, self.world.world_size)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint: trained weights (and frozen ones that no file has), buffers and optimizer state."""
        return self._bytes(capability(self.recipe.model, Streamable).in_base(self.module))

    @cached_property
    def state_bytes(self) -> int:
        """Size of all weights, buffers and optimizer state, over all ranks."""
        return self._bytes()

    def _bytes(self, excluded: Collection[str] = ()) -> int:
        optim, memory = self.recipe.optim, self.recipe.memory
        dtype, tensors = weights_dtype(memory), _moments(optim)
        total = sum(buffer.nbytes for buffer in self.module.buffers())
        for name, parameter in self.module.named_parameters():
            if name in excluded:
                continue
            codes = not (parameter.is_floating_point() or parameter.is_complex())
            width = parameter.element_size() if dtype is None or codes else dtype.itemsize
            state = tensors * width * memory.optimizer_state_bits / 32 if parameter.requires_grad else 0
            average = max(4, width) if parameter.requires_grad and optim.ema is not None else 0
            total += int(parameter.numel() * (width + state + average))
        return total


def _moments(optim: Optim) -> int:
    """Count the state tensors of a weight's size that the optimizer creates for a small matrix."""
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = build_optimizer([weight], optim, Memory(), weight.device)
    init_optimizer_state(optimizer)
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in optimizer.state[weight].values())


@dataclass(frozen=True)
class Finding:
    """The result of a check: ok, a possible problem (warning), a certain one (FAIL), or skipped. ``check`` is what was
    checked, by default the name of the check. The text of a :class:`RecipeError` has its ``fix``."""

    status: Status
    text: str
    fix: str = ""
    check: str = ""

    def line(self) -> str:
        """Format the finding for the terminal, without secrets."""
        line = f"{self.status:<8} {self.check:<18} {self.text}" + (f"; fix: {self.fix}" if self.fix else "")
        return escaped(redact(line))

    def to_json(self) -> dict[str, str]:
        """Return the finding as JSON values, without secrets."""
        return redact_value({"check": self.check, **asdict(self)})


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
fail = partial(Finding, "FAIL")
skipped = partial(Finding, "skipped")


def findings(check: str, run_check: Callable[[], Finding | Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of ``run_check``; an exception becomes a finding."""
    try:
        found = run_check()
        for one in [found] if isinstance(found, Finding) else found:
            yield one if one.check else replace(one, check=check)
    except (RecipeError, RunError) as error:
        yield fail(describe_error(error), check=check)
    except (Exception, SystemExit) as error:
        why = f"the check ended with {describe_error(error)}"
        yield fail(why, "if the run starts nevertheless, report this as a bug", check)
