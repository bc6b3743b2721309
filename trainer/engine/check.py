"""Whether a model's losses are what the model says they are."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.contract import Model
from trainer.engine.forward import Forward
from trainer.engine.sync import reshard
from trainer.engine.window import MicroBatch
from trainer.errors import RecipeError, require
from trainer.values import Loss

ITEMS = "the sum of the losses of the micro-batch's items, and how many items it is the sum of"
YIELD = f"yield Loss(total, weight): {ITEMS}"
ONCE = "yield every one of loss_names once for each"
Weights = Mapping[str, float]
COMPARED = 4  # samples that are compared with their two halves: few, for this is besides the step
# How far a sum may be from that of its halves, relative to them: kernels round otherwise for other shapes.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 5e-3}
HALF_TOLERANCE = 3e-2


class LossCheck:
    """Looks at the losses of the first step; afterwards nobody has the time."""

    def __init__(self, model: Model) -> None:
        self.model, self.kind = model, type(model).__name__
        self.seen: Counter[str] = Counter()
        self.compared = False

    def each(self, losses: Any, batch: Any) -> Iterator[Loss]:
        """What ``losses()`` returned for ``batch``, each looked at before it goes on to backward."""
        is_some = isinstance(losses, Iterable) and not isinstance(losses, Loss | Tensor)
        require(is_some, f"{self.kind}: losses() returns a {type(losses).__name__}: {YIELD}")
        names: set[str] = set()
        for loss in losses:
            self._require_loss(loss)
            self.see(loss, batch)
            if loss.name in names:  # before it is trained on: it may go on for ever
                raise RecipeError(f"{self.kind}: losses() yields {loss.name!r} twice for a micro-batch: {ONCE}")
            names.add(loss.name)
            yield loss

    def _require_loss(self, loss: Any) -> None:
        require(isinstance(loss, Loss), f"{self.kind}: losses() yields a {type(loss).__name__}: {YIELD}")
        total, where = loss.total, f"{self.kind}: loss {loss.name!r}"
        require(
            isinstance(total, Tensor) and total.numel() == 1,
            f"{where} has a total of {_kind_of(total)}: give the sum as a scalar tensor (reduction='sum')",
        )
        require(
            total.requires_grad,
            f"{where} has no graph, so nothing can be learned from it: compute its total from module(...), without "
            ".item(), .detach() or torch.no_grad(), and leave some parameters trainable",
        )

    def see(self, loss: Loss, batch: Any) -> None:
        """A loss must have a declared name, and report the weight that it is divided by."""
        promised, where = self.model.weigh(batch), f"{self.kind}: loss {loss.name!r}"
        if loss.name not in promised or loss.name not in self.model.loss_names:
            raise RecipeError(
                f"{self.kind}: losses() yields {loss.name!r}, loss_names are {', '.join(self.model.loss_names)} and "
                f"weigh() weighs {', '.join(promised)}: use the same names in all three"
            )
        weight = loss.counted()
        try:
            reported = float(weight)
        except (TypeError, ValueError, RuntimeError) as error:
            text = f"{where} has a weight of {_kind_of(weight)}: give the number of items as a number"
            raise RecipeError(text) from error
        closeness = 1e-12 if loss.total.dtype == torch.float64 else 1e-6
        if not math.isclose(promised[loss.name], reported, rel_tol=closeness):
            raise RecipeError(
                f"{where} reports weight {reported:.15g} for a micro-batch that weigh() weighed "
                f"{promised[loss.name]:.15g}: make losses() and weigh() count the same items"
            )
        self.seen[loss.name] += 1

    def end(self, micro_steps: int) -> None:
        """Every declared loss must have come once a micro-batch."""
        for name in self.model.loss_names:
            found = f"{self.kind}: losses() yielded {name!r} {self.seen[name]} times in {micro_steps} micro-batches"
            require(self.seen[name] == micro_steps, f"{found}: {ONCE}")

    def compare(self, forward: Forward, micro: MicroBatch, ranks: int, generator: torch.Generator) -> None:
        """Once: the losses of some samples of ``micro`` must be those of their two halves added up, as no mean is.

        In eval mode and without gradients. Not compared is a model whose losses are drawn, a micro-batch whose tensors
        do not all have a row for each sample, and one that a model cannot take in smaller pieces. Every rank makes the
        same number of forwards.
        """
        if self.compared or self.model.samples_interact:
            return
        self.compared = True
        pieces = halves(micro.batch, len(micro.indices), self.model.weigh)
        if pieces is not None:
            self._require_counts(*map(self.model.weigh, pieces))
        elif ranks == 1:
            return
        with untouched(forward.module, generator):
            found = [self._totals(forward, piece) for piece in pieces or [micro.batch] * 3]
            tolerance = _tolerance(forward.module)
            wrong = self._wrong(found, tolerance) if pieces else {}
            is_wrong = torch.tensor([int(bool(wrong))], device=forward.device)
            if ranks > 1:
                torch.distributed.all_reduce(is_wrong)
            if is_wrong.item():  # on any rank; perhaps they are drawn
                again = self._totals(forward, pieces[0] if pieces else micro.batch)
                for name in list(wrong):
                    if not math.isclose(float(again[name]), float(found[0][name]), rel_tol=tolerance):
                        del wrong[name]
        for text in wrong.values():
            raise RecipeError(
                f"{self.kind}: {text}: losses() must give the sum over the samples, not a mean (use reduction='sum'); "
                "if the loss of a sample depends on the others of its micro-batch, say so by samples_interact = True"
            )

    def _require_counts(self, whole: Weights, left: Weights, right: Weights) -> None:
        for name, weight in whole.items():
            if not math.isclose(weight, left[name] + right[name], rel_tol=1e-5):
                raise RecipeError(
                    f"{self.kind}: weigh() says {weight:g} of loss {name!r} for some samples, and {left[name]:g} + "
                    f"{right[name]:g} for their two halves: it must count the items (samples or tokens) that losses() "
                    "sums over"
                )

    def _totals(self, forward: Forward, batch: Any) -> dict[str, Tensor]:
        """The losses of ``batch``; none where the model cannot take it, which the step finds out if it is no cut's."""
        try:
            losses = islice(forward.losses(batch), len(self.model.loss_names) + 1)  # they may have no end
            return {loss.name: loss.total.detach().double().reshape(()) for loss in losses}
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return {}

    def _wrong(self, found: Sequence[Mapping[str, Tensor]], tolerance: float) -> dict[str, str]:
        """What is to be said of the losses that do not add up; one that is not finite is not compared."""
        wrong = {}
        for name in [name for name in self.model.loss_names if all(name in totals for totals in found)]:
            whole, left, right = (float(totals[name]) for totals in found)
            if abs(whole - left - right) > tolerance * (abs(left) + abs(right)):
                parts = f"{left:g} + {right:g}"
                wrong[name] = f"loss {name!r} of some samples is {whole:g}, of their two halves {parts}"
        return wrong


def halves(batch: Any, count: int, weigh: Callable[[Any], Weights]) -> list[Any] | None:
    """Some of the ``count`` samples of ``batch``, and their two halves, each with a weight; ``None`` if it is not cut.

    A sample that is alone is taken twice.
    """
    try:
        heavy = [place for place in range(count) if all(weigh(taken(batch, [place], count)).values())][:COMPARED]
        if not heavy:
            return None
        middle = len(heavy) // 2
        left, right = (heavy[:middle], heavy[middle:]) if middle else (heavy, heavy)
        return [taken(batch, places, count) for places in (left + right, left, right)]
    except Exception:  # a batch of somebody's own, which only its model understands
        return None


def taken(batch: Any, places: list[int], count: int) -> Any:
    """The samples at ``places`` of a batch of ``count``; ``ValueError`` if some tensor has no row for each sample."""
    if isinstance(batch, Tensor):
        if batch.ndim and len(batch) != count:
            raise ValueError(f"a tensor of {len(batch)} rows for {count} samples")
        return batch[places] if batch.ndim else batch
    if isinstance(batch, Mapping):
        clone: Any = copy.copy(batch)
        for key, value in batch.items():  # some mappings have no update(), or one that refuses
            clone[key] = taken(value, places, count)
        return clone
    if isinstance(batch, list | tuple):
        parts = _taken_of(batch, places, count)
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if batch is None or isinstance(batch, str | int | float):
        return batch
    raise ValueError(f"a {type(batch).__name__} cannot be cut")


def _taken_of(batch: Sequence[Any], places: list[int], count: int) -> list[Any]:
    """Of a sequence: of its fields, or of the samples that are its items."""
    is_of_samples = len(batch) == count
    try:
        parts = [taken(item, places, count) for item in batch]
    except ValueError:
        if not is_of_samples:
            raise
        return [batch[place] for place in places]
    if all(part is item for part, item in zip(parts, batch, strict=True)):  # texts or numbers
        return [batch[place] for place in places] if is_of_samples else parts
    if is_of_samples and not all(isinstance(item, Tensor) for item in batch):
        raise ValueError("its items could be fields as well as samples")
    return parts


@contextmanager
def untouched(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Eval mode, without gradients and without compiling; in the end everything is as it was, and so is what is drawn.

    Modes are set one by one: ``eval()`` may do more, and some parts may be in it already.
    """
    modes = [(part, part.training) for part in module.modules()]
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state(), generator.get_state()
    # Once dynamo has met these shapes, it would compile for any; without it, nothing has been compiled.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad(), eager:
            yield
    finally:
        for part, training in modes:
            part.training = training
        reshard(module)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        generator.set_state(drawn[3])


def _tolerance(module: nn.Module) -> float:
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if isinstance(module, FSDPModule):
        types.add(module._get_fsdp_state()._mp_policy.param_dtype or torch.float32)
    return max((TOLERANCES.get(dtype, HALF_TOLERANCE) for dtype in types), default=HALF_TOLERANCE)


def _kind_of(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
