"""Compares what an optimizer step was given with what the whole batch gives, and names the kind of the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.cases import Case, collate, loss_of
from conformance.record import Step

EXACT = 1e-9
"""Largest relative error of an exact gradient in float64."""

VISIBLE = 1e-6
"""Up to here an error is the rounding of float32, which some models and losses compute in."""

KINDS = ("exact", "rounding", "factor", "ragged", "order", "samples", "rate", "update", "other")
"""``rounding`` is at most float32's. ``ragged`` means unequal weights of the samples."""


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
        module: the same model as the one that was trained, in float64.
    """

    def __init__(self, case: Case, module: nn.Module) -> None:
        self.case, self.module = case, module.to(torch.float64)
        self.samples = dict(enumerate(case.dataset(), 1))

    def load(self, weights: dict[str, Tensor]) -> None:
        """Set the weights that a step had."""
        self.module.load_state_dict(weights, strict=False)
        self.names = [name for name, one in self.module.named_parameters() if one.requires_grad]

    def of_samples(self, numbers: Sequence[int]) -> Tensor:
        """Return the gradients of the samples' shares of the mean loss, shape (samples, parameters).

        Their sum is the gradient of the mean. Each loss is divided before its backward, as trainers do, because some
        models compute parts in float32.
        """
        found = [loss_of(self.case, self.module, [self.samples[number]]) for number in numbers]
        weight = sum(one for _, one in found) or 1.0
        return torch.stack([self._gradient(total / weight) for total, _ in found])

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


def judge(
    case: Case,
    reference: Reference,
    steps: Sequence[Step],
    seen: Sequence[Sequence[Sequence[int]]],
    shuffles: bool = False,
) -> Verdict:
    """Return the verdict on a run.

    Args:
        case: what was to be trained.
        reference: gradients of the same model.
        steps: of one rank, whose gradients are those of all.
        seen: for each step the samples of all forward passes of all ranks.
        shuffles: whether the trainer chooses the order. A step must then have the right number of samples.
    """
    windows, given = case.windows(), [Counter(n for passed in step for n in passed) for step in seen]
    if len(steps) != len(windows):
        return Verdict("samples", None, f"{len(steps)} optimizer steps instead of {len(windows)}")
    if shuffles:
        windows = shuffled(case, windows, given) or windows
    worst = Verdict("exact", 0.0)
    for number, (step, window) in enumerate(zip(steps, windows, strict=True)):
        reference.load(step.weights)
        verdict = judge_step(case, reference, step, sorted(window), given[number])
        if KINDS.index(verdict.kind) > KINDS.index(worst.kind) or (
            verdict.kind == worst.kind and (verdict.error or 0) > (worst.error or 0)
        ):
            worst = Verdict(
                verdict.kind, verdict.error, f"step {number + 1}: {verdict.detail}" if verdict.detail else ""
            )
    if worst.kind in ("exact", "rounding"):
        return judge_rates(case, steps) or judge_updates(case, steps, reference) or worst
    return worst


def shuffled(case: Case, windows: Sequence[set[int]], given: Sequence[Counter[int]]) -> list[set[int]] | None:
    """Return the windows in the order of a trainer, if each epoch has every sample once."""
    found = [set(one) for one in given]
    per_epoch = len(windows) // case.epochs
    epochs = [found[start : start + per_epoch] for start in range(0, len(found), per_epoch)]
    is_whole = all(set().union(*epoch) == set(range(1, case.samples + 1)) for epoch in epochs)
    return found if is_whole and [len(one) for one in found] == [len(one) for one in windows] else None


def judge_step(case: Case, reference: Reference, step: Step, window: list[int], given: Counter[int]) -> Verdict:
    """Return the verdict on one optimizer step, which should have the gradient of the samples ``window``."""
    found = flat(step.gradients, reference.names, step.weights)
    if case.model in ("batch norm", "mixtral"):
        expected = reference.of_batch(window)
        rows = None
    else:
        rows = reference.of_samples(window)
        expected = rows.sum(0)
    if "clip" in case.needs:
        expected = expected * min(1.0, CLIP / (float(expected.norm()) + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    error = distance(found, expected)
    if (given and set(given) != set(window)) or any(count > 1 for count in given.values()):
        return Verdict("samples" if set(given) & set(window) else "order", error, difference(given, window))
    if error <= VISIBLE:
        return Verdict("exact" if error <= EXACT else "rounding", error)
    return name_difference(found, expected, rows, window, error)


CLIP = 0.05
"""Norm to which gradients are clipped in cases that need it; below the norm of every whole batch."""


def difference(given: Counter[int], window: Sequence[int]) -> str:
    """Return which samples were left out, are from another step, or came more than once."""
    parts = {
        "lost": sorted(set(window) - set(given)),
        "of another step": sorted(set(given) - set(window)),
        "twice": sorted(number for number, count in given.items() if count > 1),
    }
    return ", ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in parts.items() if numbers)


def name_difference(
    found: Tensor, expected: Tensor, rows: Tensor | None, window: Sequence[int], error: float
) -> Verdict:
    """Return the kind of a wrong gradient: a factor, unequal weights of samples, or something else."""
    factor = float(found @ expected / (expected @ expected))
    if distance(found, factor * expected) <= VISIBLE:
        return Verdict("factor", error, f"{factor:.4g} times the gradient of the whole batch")
    if rows is None:
        return Verdict("other", error)
    shares = torch.linalg.lstsq(rows.T, found.unsqueeze(1), driver="gelsd").solution.flatten()
    if distance(rows.T @ shares, found) <= VISIBLE:
        shares = shares.where(shares.abs() > VISIBLE, 0)
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
