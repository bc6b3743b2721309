"""The conclusion of ``report.html``: which classes fail, and flags to try that the recipe accepts."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml

from trainer.commands.recipes import load_recipe
from trainer.report.conclusion import describe_failures, suggest_next
from trainer.report.plots import read_metrics
from trainer.settings import change, dump_recipe

FALLING = [2 - 0.02 * step for step in range(40)]
FLAT = [0.5 + 0.05 * (step % 2) for step in range(40)]
NEVER = np.array([[9, 0], [4, 0]])
GOOD = np.array([[8, 1], [0, 4]])


def curves_of(folder, training, evaluated=(), split="val"):
    rows = [f"{step},{loss}," for step, loss in enumerate(training, start=1)]
    rows += [f"{10 * (at + 1)},,{loss}" for at, loss in enumerate(evaluated)]
    (folder / "metrics.csv").write_text("\n".join([f"step,loss,{split}_loss", *rows]))
    return read_metrics(folder / "metrics.csv")


def tree_of(reference, **changes):
    recipe, source = load_recipe(reference)
    return yaml.safe_load(dump_recipe(change(recipe, changes), source))


@pytest.mark.parametrize(
    ("confusion", "sentences"),
    [
        ([[3, 0], [0, 5]], []),
        ([[0, 0], [0, 0]], []),
        ([[0, 0, 0], [0, 5, 1], [0, 2, 2]], ["Lowest recall: c, 50.0 % (2 of 4).", "c is predicted as b (2 of 4)."]),
        ([[9, 0, 0], [4, 0, 0], [2, 0, 0]], ["Never predicted: b (of 4), c (of 2).", "b is predicted as a (4 of 4)."]),
    ],
    ids=["no mistake", "no sample", "a class without samples", "never predicted"],
)
def test_sentences_name_the_classes_that_fail(confusion, sentences):
    found = describe_failures(np.array(confusion), "abc")
    assert [line.removeprefix("Most frequent confusion: ") for line in found] == sentences


def test_of_many_classes_that_are_never_predicted_some_are_named():
    confusion = np.zeros((9, 9), dtype=int)
    confusion[:, 0] = 1
    found = describe_failures(confusion, "abcdefghi")
    assert found[0] == "Never predicted: b (of 1), c (of 1), d (of 1), e (of 1), f (of 1) and others."


@pytest.mark.parametrize("reference", ["vit_digits", "mlp_fashion_mnist", "text_files"])
@pytest.mark.parametrize("case", ["never predicted", "falling", "falling, limited", "no validation set"])
def test_suggested_flags_are_flags_of_the_recipe(tmp_path, reference, case):
    confusion = NEVER if case == "never predicted" else GOOD
    curves = curves_of(tmp_path, FALLING if case.startswith("falling") else FLAT)
    tree = tree_of(reference, epochs=7, max_steps=40 if case == "falling, limited" else None)
    found = suggest_next(confusion, curves, case != "no validation set", tree)
    flags = re.findall(r"--([\w.]+) (\S+?)[: ]", " ".join(found))
    expected = {"falling": {"epochs": "14"}, "falling, limited": {"max_steps": "80"}}
    expected["no validation set"] = {"data.val_fraction": "0.1"}
    expected["never predicted"] = {"model.loss.class_weights": "balanced", "data.sampling": "balanced"}
    assert dict(flags).items() <= expected[case].items()
    assert dict(flags)
    recipe, _ = load_recipe(reference)
    change(recipe, {name: yaml.safe_load(text) for name, text in flags})  # rejects unknown settings and values


def test_a_recipe_that_balances_already_is_not_told_to(tmp_path):
    balanced = {"model.loss.class_weights": [1.0] * 10, "data.sampling": "balanced"}
    assert suggest_next(NEVER, curves_of(tmp_path, FLAT), True, tree_of("vit_digits", **balanced)) == []
    assert suggest_next(NEVER, curves_of(tmp_path, FLAT), True, {}) == []


@pytest.mark.parametrize("has_val", [True, False])
def test_overfitting_is_told_from_both_losses(tmp_path, has_val):
    curves = curves_of(tmp_path, FALLING, [1.5, 1.3, 1.4, 1.6], "val" if has_val else "test")
    (line,) = suggest_next(GOOD, curves, has_val, {})
    text = "the evaluated loss rose from 1.3000 (step 20) to 1.6000, and the training loss is 1.2900"
    assert line.endswith(f"the model overfits ({text})")
    assert ("--run.patience" in line) == has_val
    (line,) = suggest_next(GOOD, curves, has_val, {"run": {"patience": 2}})
    assert line.startswith("fewer epochs or more data")
    diverged = curves_of(tmp_path, FALLING[::-1], [1.5, 1.3, 1.4, 1.6])
    assert suggest_next(GOOD, diverged, True, {}) == []


@pytest.mark.parametrize("training", [[], [2.0, 1.0], FLAT, FALLING[::-1]])
def test_short_flat_or_rising_losses_give_no_suggestion(tmp_path, training):
    assert suggest_next(None, curves_of(tmp_path, training), True, {}) == []


def test_a_run_without_metrics_gives_no_suggestion(tmp_path):
    assert suggest_next(None, read_metrics(tmp_path / "metrics.csv"), True, {}) == []
