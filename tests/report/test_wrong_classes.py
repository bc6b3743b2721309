"""errors.csv and the confusion matrix: what a plain loop finds, whatever the cut and the ranks."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from trainer import Memory, Optim, Recipe, Run, evaluate, fit
from trainer.data import Digits
from trainer.models import MLP
from trainer.report.mistakes import MAX_MISTAKES, Mistake, TopMistakes, write_mistakes
from trainer.values import Loss


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def recipe(run_dir: Path) -> Recipe:
    given = {"data": Digits(test_fraction=0.5), "optim": Optim("sgd", lr=0.05), "batch_size": 64, "max_steps": 6}
    run = Run(dir=str(run_dir), progress=False, predict=False)
    return Recipe(model=MLP([16]), memory=Memory(micro_batch_size=7), run=run, **given)


def plain(run_dir: Path) -> tuple[np.ndarray, list[tuple[int, int, int, float, float]], Callable[[int], str]]:
    """The confusion matrix and all mistakes, the surest first, without any of the trainer's loop."""
    from trainer.checkpoint.export import load_model
    from trainer.engine.data_feed import fill_from_data

    given = recipe(run_dir)
    given.data.prepare()
    model = fill_from_data(given.model, given.data)
    test = given.data.test
    batch = given.data.collate([test[i] for i in range(len(test))])
    shares = next(model.losses(load_model(model, run_dir / "model").eval(), batch)).logits.softmax(-1)
    confusion, found = np.zeros((10, 10), dtype=int), []
    for at, (target, share) in enumerate(zip(batch["labels"].tolist(), shares.tolist(), strict=True)):
        said = max(range(10), key=share.__getitem__)
        confusion[target, said] += 1
        if said != target:
            found.append((at, target, said, share[said], share[target]))
    return confusion, sorted(found, key=lambda one: -one[3]), test.describe


@pytest.mark.slow
def test_a_run_writes_the_mistakes_of_a_plain_loop(tmp_path):
    fit(recipe(tmp_path / "run"))
    confusion, mistakes, describe = plain(tmp_path / "run")
    header, *table = rows(tmp_path / "run" / "confusion.csv")
    assert header == ["true class, predicted as", *map(str, range(10))]
    assert [row[0] for row in table] == header[1:]
    assert np.array_equal(np.array([row[1:] for row in table], dtype=int), confusion)
    header, *table = rows(tmp_path / "run" / "errors.csv")
    assert header == ["split", "position", "sample", "true", "predicted", "probability", "probability_of_true"]
    assert len(table) == min(MAX_MISTAKES, len(mistakes)) == MAX_MISTAKES  # six steps teach little: there are more
    for row, (at, target, said, p, q) in zip(table, mistakes, strict=False):
        assert [float(row[5]), float(row[6])] == pytest.approx([p, q], abs=2e-6)
        if row[1] == str(at):  # two that are equal to the last bit may change places
            assert row[:5] == ["test", str(at), describe(at), str(target), str(said)]
    assert len({row[1] for row in table} ^ {str(one[0]) for one in mistakes[:MAX_MISTAKES]}) <= 2
    with Image.open(tmp_path / "run" / "confusion.png") as image:
        assert image.size == (1200, 1000)
    evaluate(recipe(tmp_path / "run"), tmp_path / "run")
    for name in ("confusion.csv", "classification_report.txt"):
        assert (tmp_path / "run" / "evaluation" / name).read_text() == (tmp_path / "run" / name).read_text()
    assert [row[:5] for row in rows(tmp_path / "run" / "evaluation" / "errors.csv")][:20] == [
        header[:5],
        *(row[:5] for row in table[:19]),
    ]


@pytest.mark.parametrize(
    ("logits", "targets"),
    [
        (torch.randn(2, 7, 4), torch.zeros(2, 7).long()),  # of tokens
        (torch.randn(9, 4), torch.zeros(9).long()),  # of tokens that are packed
        (torch.randn(2, 4), torch.rand(2, 4)),  # several labels
        (torch.randn(2, 1), torch.rand(2)),  # numbers
        (None, None),
    ],
)
def test_what_is_no_class_of_a_sample_has_no_mistakes(logits, targets):
    found = TopMistakes()
    found.samples = [3, 4]
    found.update(Loss(torch.zeros(()), 1.0, logits=logits, targets=targets))
    assert found.worst() == []


def test_a_thousand_classes_stay_small_and_keep_the_worst(tmp_path):
    classes = 1500
    confusion = np.diag(np.full(classes, 3))
    confusion[7, 1400] = 9
    names = [f"$x^{k} \x1b" for k in range(classes)]
    write_mistakes(tmp_path, confusion, [Mistake(2, 7, 1400, 0.9, 0.1)], names, "val", "row {}".format)
    header, *table = rows(tmp_path / "confusion.csv")
    assert (len(header), len(table)) == (1001, 1000)
    assert table[7][header.index("$x^1400 \\x1b")] == "9"
    assert rows(tmp_path / "errors.csv")[1] == [
        "val",
        "2",
        "row 2",
        "$x^7 \\x1b",
        "$x^1400 \\x1b",
        "0.900000",
        "0.100000",
    ]
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"confusion.csv", "errors.csv", "confusion.png"}
    assert sum(sizes.values()) < 3_000_000, json.dumps(sizes)
