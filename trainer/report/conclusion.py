"""The conclusion of ``report.html``: which classes fail, and what to try next, by plain rules."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.report.plots import Curve

MAX_NAMED = 5  # max classes in a sentence
MIN_RISE = 0.02  # min rise of the evaluated loss above its minimum, as a share, that counts as overfitting
MIN_ERRORS = 2.0  # min fall of the training loss, in standard errors, that counts as still falling


def describe_failures(confusion: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return sentences about never predicted classes or the lowest recall, and the most frequent confusion."""
    right, true, said = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    wrong, found = confusion - np.diag(right), []
    if not wrong.any():
        return []
    if len(never := np.flatnonzero((said == 0) & (true > 0))):
        listed = ", ".join(f"{names[k]} (of {true[k]:,})" for k in never[:MAX_NAMED].tolist())
        found.append(f"Never predicted: {listed}{' and others' * (len(never) > MAX_NAMED)}.")
    else:
        k = int(np.where(true > 0, right / np.maximum(true, 1), np.inf).argmin())  # a class without samples has none
        found.append(f"Lowest recall: {names[k]}, {100 * right[k] / true[k]:.1f} % ({right[k]:,} of {true[k]:,}).")
    row, column = divmod(int(wrong.argmax()), len(wrong))
    count = f"{wrong[row, column]:,} of {true[row]:,}"
    return [*found, f"Most frequent confusion: {names[row]} is predicted as {names[column]} ({count})."]


def suggest_next(
    confusion: np.ndarray | None, curves: Mapping[str, Curve], has_val: bool, recipe: Mapping[str, Any]
) -> list[str]:
    """Return what to try next, with flags; ``recipe`` is the content of ``recipe.yaml``."""
    model, data = recipe.get("model") or {}, recipe.get("data") or {}
    found = _of_losses(curves, has_val, recipe)
    if confusion is not None and (confusion.sum(0)[confusion.sum(1) > 0] == 0).any():
        is_unweighted = (model.get("loss") or {}).get("class_weights", "unknown") is None
        is_uniform = data.get("sampling") == "uniform" and model.get("task", "single_label") == "single_label"
        ways = ["--model.loss.class_weights balanced"] * is_unweighted + ["--data.sampling balanced"] * is_uniform
        found += [f"{' or '.join(ways)}: some classes are never predicted"] if ways else []
    if not has_val and "val_fraction" in data:
        found.append("--data.val_fraction 0.1: without a validation set, the last step is kept instead of the best")
    return found


def _of_losses(curves: Mapping[str, Curve], has_val: bool, recipe: Mapping[str, Any]) -> list[str]:
    trained, losses = curves["loss"]
    count, limit = max(2, len(losses) // 5), recipe.get("max_steps")
    if len(losses) < 2 * count:
        return []
    before, last = losses[-2 * count : -count].mean(), losses[-count:].mean()
    steps, values = max(curves["val_loss"], curves["test_loss"], key=lambda curve: len(curve[0]))
    if len(values) and last < values.min() < values[-1] - MIN_RISE * abs(values.min()):
        least = f"{values.min():.4f} (step {steps[values.argmin()]:,.0f})"
        rise = f"the evaluated loss rose from {least} to {values[-1]:.4f}"
        stop = "--run.patience 3, " if has_val and not (recipe.get("run") or {}).get("patience") else ""
        return [f"{stop}fewer epochs or more data: the model overfits ({rise}, and the training loss is {last:.4f})"]
    if before - last > MIN_ERRORS * np.diff(losses[-2 * count :]).std() / count**0.5:
        name = "max_steps" if limit is not None and trained[-1] >= limit else "epochs"
        return [f"--{name} {2 * recipe.get(name, 1)}: the training loss was still falling at the end"]
    return []
