"""Check that a model's losses are sums over samples, and that their weights are counts."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.contract import Model, WholeBatch
from trainer.engine.forward import Forward
from trainer.engine.model_state import ModelState
from trainer.engine.sync import reshard
from trainer.engine.two_pass import embeddings_of
from trainer.engine.window import Window
from trainer.errors import RecipeError, require
from trainer.values import Loss

ITEMS = "the sum of the losses of the micro-batch's items, and the number of items"
YIELD = f"yield Loss(total, weight): {ITEMS}"
ONCE = "yield each of loss_names once per micro-batch"
Weights = Mapping[str, float]
HALF = 2
COMPARED = 2 * HALF  # max samples compared with their two halves; few, because this is in addition to the step
WATCHED = 100  # first steps, in which samples that differ in a new column are compared
PLACE = -1  # key of the column of positions, in which all samples of a micro-batch differ
# Relative tolerance between a sum and the sum of its halves: kernels round differently for other shapes.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 5e-3}
HALF_TOLERANCE = 3e-2


class LossCheck:
    """Validates every loss of the first step, and compares the losses of a few samples in the first steps."""

    def __init__(self, model: Model) -> None:
        self.model, self.kind = model, type(model).__name__
        self.source = "loss_of_all() returns" if isinstance(model, WholeBatch) else "losses() yields"
        self.seen: Counter[str] = Counter()
        self.steps, self.is_done = 0, model.samples_interact
        self.columns: set[Any] = set()
        self.compared: set[Any] = set()  # columns whose different values have been compared

    def checked(self, losses: Any, batch: Any) -> Any:
        """Return ``losses``, the result for ``batch``; in the first step, check each loss before its backward."""
        return losses if self.steps else self._checked(losses, batch)

    def _checked(self, losses: Any, batch: Any) -> Iterator[Loss]:
        if not isinstance(losses, Iterable) or isinstance(losses, Loss | Tensor):
            raise RecipeError(f"{self.kind}: losses() returns a {type(losses).__name__}: {YIELD}")
        names: set[str] = set()
        for loss in losses:
            self.require_loss(loss)
            self.check_loss(loss, batch)
            if loss.name in names:  # before its backward: losses() may be endless
                raise RecipeError(f"{self.kind}: losses() yields {loss.name!r} twice: {ONCE}")
            names.add(loss.name)
            yield loss

    def require_loss(self, loss: Any) -> None:
        require(isinstance(loss, Loss), f"{self.kind}: {self.source} a {type(loss).__name__}: {YIELD}")
        total, where = loss.total, f"{self.kind}: loss {loss.name!r}"
        if not isinstance(total, Tensor) or total.numel() != 1:
            fix = "give the sum as a scalar tensor (reduction='sum')"
            raise RecipeError(f"{where} has a total of {_kind_of(total)}: {fix}")
        if not total.requires_grad:
            raise RecipeError(
                f"{where} has no gradient graph, so the model cannot learn from it: compute its total from module(...) "
                "without .item(), .detach() or torch.no_grad(), and leave some parameters trainable"
            )

    def check_loss(self, loss: Loss, batch: Any) -> None:
        """Require that the loss has a declared name and reports the weight that it is divided by."""
        promised, where = self.model.weigh(batch), f"{self.kind}: loss {loss.name!r}"
        if loss.name not in promised or loss.name not in self.model.loss_names:
            raise RecipeError(
                f"{self.kind}: losses() yields {loss.name!r}, but loss_names has {', '.join(self.model.loss_names)} "
                f"and weigh() returns {', '.join(promised)}: use the same names in all three"
            )
        weight = loss.counted()
        try:
            reported = float(weight)
        except (TypeError, ValueError, RuntimeError) as error:
            text = f"{where} has a weight of {_kind_of(weight)}: return the number of items as a number"
            raise RecipeError(text) from error
        closeness = 1e-12 if loss.total.dtype == torch.float64 else 1e-6
        if not math.isclose(promised[loss.name], reported, rel_tol=closeness):
            raise RecipeError(
                f"{where} reports weight {reported:.15g}, but weigh() returned {promised[loss.name]:.15g} for the same "
                "micro-batch: make both count the same items"
            )
        self.seen[loss.name] += 1

    def check_complete(self, micro_steps: int) -> bool:
        """End a step; require each declared loss once per micro-batch. Return whether all checks are done."""
        for name in self.model.loss_names if not self.steps else ():
            found = f"{self.kind}: losses() yielded {name!r} {self.seen[name]} times in {micro_steps} micro-batches"
            require(self.seen[name] == micro_steps, f"{found}: {ONCE}")
        self.steps += 1
        return self.is_done or self.steps == WATCHED

    def check_additive(self, forward: Forward, window: Window, ranks: int, generator: torch.Generator) -> None:
        """Require that the loss of a few samples is the sum of the losses of their two halves. A mean is not.

        The samples differ in a column that was not compared yet. All ranks run the same number of forwards, in eval
        mode and without gradients. Not compared are losses that are random or use statistics of the batch,
        micro-batches with a tensor without one row per sample, and micro-batches whose parts the model cannot process.
        For the loss of a whole batch, a sum over its embeddings is compared: each must depend only on its own sample.
        """
        if self.is_done:
            return
        chosen = [pieces for micro in window for pieces in self._choose(micro.batch, len(micro.indices))]
        numbers = [len(chosen), len(self.columns - self.compared)]
        if ranks > 1:
            agreed = torch.tensor(numbers, device=forward.device)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
            numbers = agreed.tolist()
        for number in range(numbers[0]):
            state = ModelState(forward.module, self.model, generator)
            try:
                self._compare(forward, state, chosen[number : number + 1], window.micro_batches[0].batch, ranks)
            finally:
                state.restore()
        self.is_done = not numbers[1]

    def _choose(self, batch: Any, count: int) -> list[list[Any]]:
        """Return the samples with the smallest and largest values of each column that was not compared yet.

        Each entry has four batches: the samples (a single one twice), their two halves, and the samples reversed.
        """
        try:
            columns = dict(enumerate(numbers_of(batch, count) if count > 1 else ())) | {PLACE: range(count)}
            chosen: dict[tuple[int, ...], list[Any]] = {}
            if any(len({*column}) > 1 or key == PLACE for key, column in columns.items() if key not in self.compared):
                weights = [self.model.weigh(select_samples(batch, [place], count)) for place in range(count)]
                heavy = [place for place in range(count) if all(weights[place].values())]
                by_weight = {name: [one[name] for one in weights] for name in weights[0]}
                for key, column in (by_weight | columns).items() if heavy else ():
                    order = sorted(heavy, key=column.__getitem__)
                    if key not in self.compared and (key == PLACE or column[order[0]] != column[order[-1]]):
                        self.compared.add(key)
                        order = order[:HALF] + order[max(HALF, len(order) - HALF) :] if len(order) > 1 else order * 2
                        if key != PLACE or not chosen:
                            parts = (order, order[: len(order) // 2], order[len(order) // 2 :], order[::-1])
                            chosen[tuple(order)] = [select_samples(batch, part, count) for part in parts]
            self.columns |= columns.keys()
            return [*chosen.values()]
        except Exception:  # a custom batch that only its model understands
            return []

    def _compare(self, forward: Forward, state: ModelState, found: Any, spare: Any, ranks: int) -> None:
        """Compare an entry of :meth:`_choose`, or run as many forwards of ``spare`` as the other ranks run.

        Some forwards write to buffers and compute with them: a difference counts only with and without writes.
        """
        if found:
            self._require_counts(*map(self.model.weigh, found[0][:3]))
        tolerance, wrong = _tolerance(forward.module), dict.fromkeys(self.model.loss_names if found else (), "")
        *pieces, backwards = found[0] if found else [spare] * 4
        for state.frozen in (True, False):
            totals = [self._totals(forward, state, piece) for piece in pieces]
            texts = {} if state.mixes_samples else self._wrong(totals, tolerance)
            wrong = {name: texts[name] for name in wrong if name in texts}
            number = torch.tensor([len(wrong)], device=forward.device)
            if ranks > 1:
                torch.distributed.all_reduce(number)
            if not number.item():  # on no rank
                return
        # If the reverse order changes the total, it is random, or the rows of some tensor do not belong to samples.
        again = self._totals(forward, state, backwards)
        for name, text in wrong.items():
            if name in again and math.isclose(float(again[name]), float(totals[0][name]), rel_tol=tolerance):
                if isinstance(self.model, WholeBatch):
                    cause = f"{self.kind}: embed() returns other embeddings for a few samples than for their two halves"
                    fix = "each must depend only on its own sample; compute what depends on others in loss_of_all()"
                    raise RecipeError(f"{cause}: {fix}")
                raise RecipeError(
                    f"{self.kind}: {text}: losses() must return the sum over the samples, not a mean (use "
                    "reduction='sum'). If the loss of a sample depends on the other samples of its micro-batch, set "
                    "samples_interact = True"
                )

    def _require_counts(self, whole: Weights, left: Weights, right: Weights) -> None:
        for name, weight in whole.items():
            if not math.isclose(weight, left[name] + right[name], rel_tol=1e-5):
                raise RecipeError(
                    f"{self.kind}: weigh() returns {weight:g} for loss {name!r} of some samples, but {left[name]:g} + "
                    f"{right[name]:g} for their two halves: it must count the items that losses() sums over"
                )

    def _totals(self, forward: Forward, state: ModelState, batch: Any) -> dict[str, Tensor]:
        """Compute the losses of ``batch`` in eval mode, without gradients or compilation; empty if the model fails."""
        for part in forward.module.modules():
            part.training = False  # a custom eval() may do more
        # Dynamo would recompile for dynamic shapes after seeing these. If it is not imported, nothing is compiled.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        try:
            with torch.no_grad(), eager, state:
                if isinstance(self.model, WholeBatch):
                    return {self.model.loss_names[0]: _sum_of_squares(embeddings_of(forward, batch, None))}
                losses = islice(forward.losses(batch), len(self.model.loss_names) + 1)  # losses() may be endless
                return {loss.name: loss.total.detach().double().reshape(()) for loss in losses}
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the step reports it if a whole micro-batch also fails
            return {}
        finally:
            reshard(forward.module)
            state.restore(generators=False)

    def _wrong(self, found: Sequence[Mapping[str, Tensor]], tolerance: float) -> dict[str, str]:
        """Describe each loss whose halves do not add up. Losses that are not finite are not compared."""
        wrong = {}
        for name in [name for name in self.model.loss_names if all(name in totals for totals in found)]:
            whole, left, right = (float(totals[name]) for totals in found)
            if abs(whole - left - right) > tolerance * (abs(left) + abs(right)):
                parts = f"{left:g} + {right:g}"
                wrong[name] = f"loss {name!r} of some samples is {whole:g}, but {parts} for their two halves"
        return wrong


def _sum_of_squares(embeddings: Tensor) -> Tensor:
    """Sum the squares of eight projections of each embedding. Its norm, which is often 1, shows too little."""
    rows = embeddings.flatten(1).double()
    angles = torch.arange(1, 9, device=rows.device) * torch.arange(rows.shape[1], device=rows.device)[:, None]
    return (rows @ angles.to(rows).cos()).square().sum()


def numbers_of(batch: Any, count: int) -> Iterator[Sequence[float]]:
    """Yield columns of ``count`` numbers: values (labels), and counts of positive entries (lengths from masks)."""
    if isinstance(batch, Tensor) and batch.ndim and len(batch) == count:
        rows = batch.reshape(count, batch[0].numel())
        if rows.shape[1] == 1 or rows.dtype in (torch.int64, torch.int32, torch.bool):
            yield (rows[:, 0] if rows.shape[1] == 1 else (rows > 0).sum(1)).tolist()
    elif isinstance(batch, list) and len(batch) == count and isinstance(batch[0], str):
        yield [len(text) for text in batch]
    elif isinstance(batch, Mapping | list | tuple):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from numbers_of(item, count)


def select_samples(batch: Any, indices: list[int], count: int) -> Any:
    """Return the samples at ``indices`` of a batch of ``count``; ValueError if a tensor lacks a row per sample."""
    if isinstance(batch, Tensor):
        if batch.ndim and len(batch) != count:
            raise ValueError(f"a tensor has {len(batch)} rows for {count} samples")
        return batch[indices] if batch.ndim else batch
    if isinstance(batch, Mapping):
        clone: Any = copy.copy(batch)
        for key, value in batch.items():  # some mappings have no update(), or one that raises
            clone[key] = select_samples(value, indices, count)
        return clone
    if isinstance(batch, list | tuple):
        parts = _taken_of(batch, indices, count)
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if batch is None or isinstance(batch, str | int | float):
        return batch
    raise ValueError(f"a {type(batch).__name__} cannot be cut")


def _taken_of(batch: Sequence[Any], places: list[int], count: int) -> list[Any]:
    """Apply :func:`select_samples` to a sequence, whose items are fields or samples."""
    is_of_samples = len(batch) == count
    try:
        parts = [select_samples(item, places, count) for item in batch]
    except ValueError:
        if not is_of_samples:
            raise
        return [batch[place] for place in places]
    if all(part is item for part, item in zip(parts, batch, strict=True)):  # texts or numbers
        return [batch[place] for place in places] if is_of_samples else parts
    if is_of_samples and not all(isinstance(item, Tensor) for item in batch):
        raise ValueError("its items may be fields or samples")
    return parts


def _tolerance(module: nn.Module) -> float:
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if isinstance(module, FSDPModule):
        types.add(module._get_fsdp_state()._mp_policy.param_dtype or torch.float32)
    return max((TOLERANCES.get(dtype, HALF_TOLERANCE) for dtype in types), default=HALF_TOLERANCE)


def _kind_of(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
