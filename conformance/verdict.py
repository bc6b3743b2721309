"""Compares what an optimizer step was given with what the whole batch gives, and names the kind of the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conformance.cases import OVERFLOWING, PAIRS, Case, collate, loss_of, weight_of_labels
from conformance.record import Pass, Step

EXACT = 1e-9
"""Largest relative error of an exact gradient in float64."""

VISIBLE = 1e-6
"""Up to here an error is the rounding of float32, which some models and losses compute in."""

KINDS = (
    "exact",
    "rounding",  # at most float32's
    "average",  # of the losses of an evaluation
    "precision",  # more rounding than a sum in float64 has
    "factor",
    "ragged",  # the samples of a step weigh differently
    "order",
    "samples",
    "seeds",  # two passes have the same dropout
    "rate",
    "update",
    "other",
)

DECAY_OF_AVERAGE = 0.9
"""Decay of the average of the weights in the case ``ema``."""


@dataclass(frozen=True)
class Run:
    """What a run did.

    Args:
        steps: optimizer steps of one rank, whose gradients are those of all.
        passes: for each step the forward passes of all ranks.
        weights: after the last step.
        shuffles: whether the trainer chooses the order. A step must then have the right number of samples.
        average: see :class:`conformance.job.Job`.
        evaluation_loss: see :class:`conformance.job.Job`.
    """

    steps: Sequence[Step]
    passes: Sequence[Sequence[Pass]]
    weights: dict[str, Tensor]
    shuffles: bool = False
    average: dict[str, Tensor] | None = None
    evaluation_loss: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What was found in the worst step of a run.

    Args:
        kind: one of ``KINDS``, or ``rejected``, ``crashed``, ``unsupported``.
        error: ‖g − reference‖ / ‖reference‖ of the worst step.
        detail: one line, such as the factor.
    """

    kind: str
    error: float | None = None
    detail: str = ""


class Reference:
    """Gradients of a model of a case in float64, one sample at a time.

    Args:
        case: with the samples and their loss.
        module: the same model as the one that was trained.
    """

    def __init__(self, case: Case, module: nn.Module) -> None:
        self.case, self.module = case, module.to(torch.float64)
        self.samples = dict(enumerate(case.dataset(), 1))
        self.masks: list[Tensor] = []
        for one in module.modules():
            if isinstance(one, nn.Dropout) and one.p:
                one.register_forward_hook(self._drop)

    def _drop(self, dropout: nn.Dropout, args: tuple[Tensor], output: Tensor) -> Tensor:
        """Drop what was dropped in the run: the same entries of a sample, without those of its padding."""
        mask = self.masks.pop(0)[tuple(slice(0, size) for size in args[0].shape)]
        return args[0] * mask / (1 - dropout.p)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Set the weights that a step had."""
        self.module.load_state_dict(weights, strict=False)
        self.names = [name for name, one in self.module.named_parameters() if one.requires_grad]

    def of_samples(self, numbers: Sequence[int], passes: Sequence[Pass] = ()) -> Tensor:
        """Return the gradients of the samples' shares of the mean loss, shape (samples, parameters).

        Their sum is the gradient of the mean. Each loss is divided before its backward, as trainers do, because some
        models compute parts in float32. Dropout is that of ``passes``.
        """
        rows = []
        places = {number: (one, row) for one in passes for row, number in enumerate(one.samples)}
        labels = collate([self.samples[number] for number in numbers]).get("labels")
        weight = weight_of_labels(self.case, labels) if labels is not None else float(len(numbers))
        for number in numbers:
            one, row = places.get(number, (Pass([]), 0))
            self.masks = [mask[row : row + 1] for mask in one.masks]
            total, _ = loss_of(self.case, self.module, [self.samples[number]])
            rows.append(self._gradient(total / (weight or 1.0)))
        return torch.stack(rows)

    def in_dtype(self, passes: Sequence[Pass]) -> Tensor:
        """Return the gradient of ``passes`` in the dtype of the case, summed in float64 and then rounded."""
        self.module.to(self.case.dtype)  # the weights of a step have this precision, so nothing is lost
        found = []
        for one in passes:
            self.masks = list(one.masks)
            found.append(loss_of(self.case, self.module, [self.samples[number] for number in one.samples]))
        weight = sum(one for _, one in found)
        total = sum(self._gradient(loss / weight).to(torch.float64) for loss, _ in found)
        self.module.to(torch.float64)
        assert isinstance(total, Tensor)
        return total.to(self.case.dtype).to(torch.float64)

    def loss(self) -> float:
        """Return the mean loss of the evaluation."""
        self.module.eval()
        with torch.no_grad():
            total, weight = loss_of(self.case, self.module, self.case.evaluation_set())
        return float(total) / weight

    def of_batch(self, numbers: Sequence[int]) -> Tensor:
        """Return the gradient of the model's own loss in one pass, for samples that depend on each other."""
        batch = collate([self.samples[number] for number in numbers])
        return self._gradient(self.module(**batch)["loss"])

    def _gradient(self, loss: Tensor) -> Tensor:
        parameters = [one for one in self.module.parameters() if one.requires_grad]
        if not loss.requires_grad:
            return torch.zeros(sum(one.numel() for one in parameters), dtype=torch.float64)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
        )


def flat(gradients: dict[str, Tensor], names: Sequence[str], like: dict[str, Tensor]) -> Tensor:
    """Return the gradients of ``names`` one after another; a parameter without one counts as zero."""
    return torch.cat([gradients.get(name, torch.zeros_like(like[name])).flatten() for name in names])


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def judge(case: Case, reference: Reference, run: Run) -> Verdict:
    """Return the verdict on a run: that on its worst step, or on what follows from its steps."""
    windows = case.windows()
    if "skip" in case.needs:
        windows = [window for window in windows if OVERFLOWING not in window]
        run = replace(run, passes=[without_skipped(case, step) for step in run.passes])
    given = [Counter(n for passed in step for n in numbers_of(case, passed)) for step in run.passes]
    if len(run.steps) != len(windows):
        return Verdict("samples", None, f"{len(run.steps)} optimizer steps instead of {len(windows)}")
    if run.shuffles:
        windows = shuffled(case, windows, given) or windows
    worst = Verdict("exact", 0.0)
    for number, (step, window) in enumerate(zip(run.steps, windows, strict=True)):
        reference.load(step.weights)
        verdict = judge_step(case, reference, step, sorted(window), given[number], run.passes[number])
        if KINDS.index(verdict.kind) > KINDS.index(worst.kind) or (
            verdict.kind == worst.kind and (verdict.error or 0) > (worst.error or 0)
        ):
            worst = Verdict(
                verdict.kind, verdict.error, f"step {number + 1}: {verdict.detail}" if verdict.detail else ""
            )
    if worst.kind in ("exact", "rounding"):
        reference.load(run.weights)
        checks = (
            judge_seeds(run),
            judge_rates(case, run.steps),
            judge_updates(case, run.steps, reference),
            judge_average(case, run, reference),
            judge_evaluation(case, run, reference),
        )
        return next((verdict for verdict in checks if verdict), worst)
    return worst


def without_skipped(case: Case, passes: Sequence[Pass]) -> Sequence[Pass]:
    """Return the passes since the step before, without those of a whole skipped step at their beginning."""
    size = case.micro_batch_size * case.accumulation * case.ranks
    count = 0
    for place, one in enumerate(passes, 1):
        count += len(one.samples)
        if count == size:
            is_skipped = any(OVERFLOWING in each.samples for each in passes[:place])
            return passes[place:] if is_skipped and place < len(passes) else passes
    return passes


def numbers_of(case: Case, one: Pass) -> list[int]:
    """Return the numbers of the samples of a pass; a pass over pairs has each twice."""
    return sorted(one.samples)[::2] if case.task in PAIRS else one.samples


def shuffled(case: Case, windows: Sequence[set[int]], given: Sequence[Counter[int]]) -> list[set[int]] | None:
    """Return the windows in the order of a trainer, if each epoch has every sample once."""
    found = [set(one) for one in given]
    per_epoch = len(windows) // case.epochs
    epochs = [found[start : start + per_epoch] for start in range(0, len(found), per_epoch)]
    counts = [sum(map(len, epoch)) for epoch in epochs]
    is_whole = all(len(set().union(*epoch)) == count for epoch, count in zip(epochs, counts, strict=True))
    return found if is_whole and [len(one) for one in found] == [len(one) for one in windows] else None


def judge_step(
    case: Case, reference: Reference, step: Step, window: list[int], given: Counter[int], passes: Sequence[Pass]
) -> Verdict:
    """Return the verdict on one optimizer step, which should have the gradient of the samples ``window``."""
    found = flat(step.gradients, reference.names, step.weights)
    if case.model in ("batch norm", "mixtral"):
        expected = reference.of_batch(window)
        rows = None
    else:
        rows = reference.of_samples(window, passes)
        expected = rows.sum(0)
    if "clip" in case.needs:
        expected = expected * min(1.0, case.clip_norm / (float(expected.norm()) + 1e-6))  # as clip_grad_norm_ of torch
    error = distance(found, expected)
    # A sample may come twice if it has no weight then: some trainers fill up the ranks in this way.
    if error > VISIBLE and (set(given) != set(window) or any(count > 1 for count in given.values())):
        return Verdict("samples" if set(given) & set(window) else "order", error, difference(given, window))
    if case.dtype != torch.float64 and rows is not None:
        rounding = distance(reference.in_dtype(passes), expected)
        times = error / rounding
        if times <= MAX_DEFECT_ROUNDING:
            text = f"{times:.2g} times the rounding of the passes and their sum in float64"
            return Verdict("exact" if times <= MAX_ROUNDING[case.dtype] else "precision", error, text)
        return name_difference(found, expected, rows, window, error, MAX_DEFECT_ROUNDING * rounding)
    if error <= VISIBLE:
        return Verdict("exact" if error <= EXACT else "rounding", error)
    return name_difference(found, expected, rows, window, error, VISIBLE)


MAX_ROUNDING = {torch.float32: 3.0, torch.bfloat16: 1.5}
"""Largest error of an exact gradient, in units of the rounding that cannot be avoided in a dtype."""

MAX_DEFECT_ROUNDING = 30
"""Up to here an error in less than float64 is one of the precision of the sum, in the same units."""


def difference(given: Counter[int], window: Sequence[int]) -> str:
    """Return which samples were left out, are from another step, or came more than once."""
    parts = {
        "lost": sorted(set(window) - set(given)),
        "of another step": sorted(set(given) - set(window)),
        "twice": sorted(number for number, count in given.items() if count > 1),
    }
    return ", ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in parts.items() if numbers)


def name_difference(
    found: Tensor, expected: Tensor, rows: Tensor | None, window: Sequence[int], error: float, visible: float
) -> Verdict:
    """Return the kind of a wrong gradient: a factor, unequal weights of samples, or something else.

    An explanation is right if it leaves a relative error of at most ``visible``.
    """
    factor = float(found @ expected / (expected @ expected))
    if distance(found, factor * expected) <= visible:
        return Verdict("factor", error, f"{factor:.4g} times the gradient of the whole batch")
    if rows is None:
        return Verdict("other", error)
    shares = torch.linalg.lstsq(rows.T, found.unsqueeze(1), driver="gelsd").solution.flatten()
    if distance(rows.T @ shares, found) <= visible:
        shares = shares.where(shares.abs() > visible, 0)
        return Verdict("ragged", error, f"samples weigh {weights_text(window, shares.tolist())} instead of 1")
    return Verdict("other", error)


def weights_text(window: Sequence[int], shares: Sequence[float]) -> str:
    """Return the weights of samples; neighbours of one weight are joined."""
    texts = [f"{share:.2g}" for share in shares]
    starts = [at for at in range(len(texts)) if at == 0 or texts[at] != texts[at - 1]]
    ends = [*(start - 1 for start in starts[1:]), len(texts) - 1]
    names = [str(window[a]) if a == b else f"{window[a]} to {window[b]}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(f"{name}: {texts[start]}" for name, start in zip(names, starts, strict=True))


def judge_rates(case: Case, steps: Sequence[Step]) -> Verdict | None:
    """Return a verdict if the learning rates are not those of a linear schedule over the optimizer steps."""
    if "schedule" not in case.needs:
        return None
    wanted = [steps[0].rate * (1 - number / len(steps)) for number in range(len(steps))]
    found = [step.rate for step in steps]
    if all(abs(one - other) < 1e-9 for one, other in zip(found, wanted, strict=True)):
        return None
    return Verdict("rate", None, f"learning rates {', '.join(f'{one:.4g}' for one in found)}")


def judge_seeds(run: Run) -> Verdict | None:
    """Return a verdict if two passes, of any ranks and steps, drop the same entries."""
    seen: dict[bytes, str] = {}
    for number, passes in enumerate(run.passes, 1):
        for place, one in enumerate(passes, 1):
            name = f"pass {place} of step {number}"
            for mask in one.masks:
                other = seen.setdefault(mask.numpy().tobytes(), name)
                if other != name:
                    return Verdict("seeds", None, f"{other} and {name} drop the same entries")
    return None


def judge_average(case: Case, run: Run, reference: Reference) -> Verdict | None:
    """Return a verdict if the average of the weights is not that of one update per optimizer step.

    It may start from the weights before the first step, or from those after it.
    """
    if "ema" not in case.needs:
        return None
    if run.average is None:
        return Verdict("update", None, "no average of the weights")
    history = [step.weights for step in run.steps] + [run.weights]
    errors = []
    for start in (0, 1):
        average = {name: history[start][name] for name in reference.names}
        for weights in history[start + 1 :]:
            for name, value in average.items():
                average[name] = DECAY_OF_AVERAGE * value + (1 - DECAY_OF_AVERAGE) * weights[name]
        found = torch.cat([run.average[name].to(torch.float64).flatten() for name in reference.names])
        errors.append(distance(found, torch.cat([average[name].flatten() for name in reference.names])))
    return Verdict("update", min(errors), "the average of the weights") if min(errors) > VISIBLE else None


def judge_evaluation(case: Case, run: Run, reference: Reference) -> Verdict | None:
    """Return a verdict if the loss of an evaluation is not the mean over all items, with the last weights."""
    if "evaluate" not in case.needs:
        return None
    expected, found = reference.loss(), run.evaluation_loss
    if found is None:
        return Verdict("average", None, "no loss of the evaluation")
    error = abs(found / expected - 1)
    return Verdict("average", error, f"{found:.6g} instead of {expected:.6g}") if error > VISIBLE else None


MOMENTUM, DECAY = 0.9, 0.1
"""SGD's settings in cases that need ``momentum``."""


def judge_updates(case: Case, steps: Sequence[Step], reference: Reference) -> Verdict | None:
    """Return a verdict if the weights of a step do not follow from those of the step before, by SGD's formula."""
    if "momentum" not in case.needs:
        return None
    for name in reference.names:
        # Whether vectors (biases, weights of norms) decay is a choice of the trainer.
        decays = (DECAY, 0.0) if steps[0].weights[name].ndim < 2 else (DECAY,)
        errors = [update_error(steps, name, decay) for decay in decays]
        if min(errors) > VISIBLE:
            return Verdict("update", min(errors), name)
    return None


def update_error(steps: Sequence[Step], name: str, decay: float) -> float:
    """Return the largest relative error of a parameter after updates by SGD with momentum and ``decay``."""
    error, buffer = 0.0, torch.zeros(())
    for number, (step, after) in enumerate(zip(steps, steps[1:], strict=False)):
        weight = step.weights[name]
        change = step.gradients.get(name, torch.zeros_like(weight)) + decay * weight
        buffer = MOMENTUM * buffer + change if number else change
        error = max(error, distance(after.weights[name], weight - step.rate * buffer))
    return error


def as_row(verdict: Verdict) -> dict[str, Any]:
    """Return what a file of results has of a verdict."""
    return {"verdict": verdict.kind, "error": verdict.error, "detail": verdict.detail}
