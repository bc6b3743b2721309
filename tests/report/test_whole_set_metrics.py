"""Metrics of all predictions together: on any ranks, custom ones too, and what is refused.

That they equal scikit-learn's is tested in test_metrics_and_scikit_learn.py.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import Metric, RecipeError, Run
from trainer.report.whole_set_metrics import WholeSetMetrics, is_higher_better
from trainer.run.collectives import gather_rows, run_on_rank_zero
from trainer.values import Loss

ITEMS = 101


def drawn(task: str, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores that know something of the targets."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ITEMS, classes, generator=generator, dtype=torch.float64)
    if task == "regression":
        return logits, logits + torch.randn(ITEMS, classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, classes, (ITEMS,), generator=generator)
    logits[torch.arange(ITEMS), targets] += 1
    targets[::10] = -100
    return logits, targets


class Worst(Metric):
    """The largest error of all items."""

    name = "worst"
    higher_is_better = False

    def compute(self, predictions: torch.Tensor, targets: torch.Tensor) -> float:
        return float((predictions - targets).abs().max())


def figures_of(pieces: list[int], names: list[Any], task: str, classes: int, **ranks: Any) -> dict[str, float]:
    """The evaluation of those of the micro-batches of ten items."""
    known = classes if task == "single_label" else None  # else some figures of the task are summed up already
    scores, (logits, targets) = WholeSetMetrics(names, task, known, **ranks), drawn(task, classes)
    for number in pieces:
        at = slice(10 * number, 10 * number + 10)
        scores.update(Loss(torch.zeros(()), 10, logits=logits[at], targets=targets[at]))
    return scores.compute(loss=0.5)


def on_ranks(shares: list[list[int]], *what: Any) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    fabric = SimpleNamespace(world_size=len(shares), global_rank=rank, device=torch.device("cpu"))
    ranks = {"gather": partial(gather_rows, fabric), "decide": partial(run_on_rank_zero, fabric)}
    return figures_of(shares[rank], *what, **ranks)


@pytest.mark.parametrize(
    ("task", "classes", "names"),
    [("single_label", 7, ["auroc", "f1_macro", "mcc", "top5_accuracy"]), ("regression", 1, ["r2", Worst()])],
)
def test_uneven_and_idle_ranks_find_what_one_process_finds(ranks, task, classes, names):
    alone = figures_of(list(range(11)), names, task, classes)
    found = ranks(3).run(on_ranks, [[0, 1, 2, 3, 4, 5], [], [6, 7, 8, 9, 10]], names, task, classes)
    assert found == [{name: pytest.approx(value, rel=1e-9) for name, value in alone.items()}] * 3


class Broken(Metric):
    name = "broken"

    def compute(self, predictions: torch.Tensor, targets: torch.Tensor) -> float:
        return predictions[10**6]


def broken_on(shares: list[list[int]]) -> str:
    with pytest.raises(RecipeError) as caught:
        on_ranks(shares, [Broken()], "single_label", 2)
    return str(caught.value)


def test_what_cannot_be_computed_is_named_on_all_ranks(ranks):
    assert all("metric broken cannot be computed (IndexError" in said for said in ranks(2).run(broken_on, [[0], []]))
    scores = WholeSetMetrics(["mcc"], "single_label", 2)
    scores.update(Loss(torch.zeros(()), 1))
    with pytest.raises(RecipeError, match=r"run.metrics=mcc needs predictions: set logits and targets"):
        scores.compute(0.5)


def test_a_set_of_one_class_has_no_curve_and_perplexity_is_of_the_loss():
    scores = WholeSetMetrics(["auroc", "perplexity"], "single_label", 2)
    scores.update(Loss(torch.zeros(()), 2, logits=torch.randn(2, 2), targets=torch.ones(2, dtype=torch.long)))
    found = scores.compute(0.5)
    assert math.isnan(found["auroc"])
    assert found["perplexity"] == math.exp(0.5)


def test_bits_a_byte_are_of_the_loss_and_of_data_that_know_their_bytes():
    scores = WholeSetMetrics(["bits_per_byte"], "language", None, bytes_per_token=2.5)
    assert scores.compute(0.5) == {"perplexity": math.exp(0.5), "bits_per_byte": 0.5 / math.log(2) / 2.5}
    with pytest.raises(RecipeError, match=r"^run.metrics=bits_per_byte needs whole documents"):
        WholeSetMetrics(["bits_per_byte"], "language", None)


def fits(metrics, task, num_classes):
    Run(metrics=metrics).validate_metrics(task, num_classes)


REFUSED = {
    "of another task": lambda: fits(["mae"], "single_label", 3),
    "of two classes": lambda: fits(["f1"], None, 3),
    "unknown": lambda: Run(metrics=["f1-macro"]),
    "unknown best": lambda: Run(best="val_acuracy"),
    "patience without best": lambda: Run(patience=2, best="last"),
    "best without evaluations": lambda: Run(best="loss", evaluate=False),
    "no name": lambda: Run(metrics=[Metric()]),
    "no metric": lambda: Run(metrics=[3]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_figure_that_does_not_fit_is_refused(case, golden):
    with golden.raises(RecipeError, hide=[r"(?<=choose one of ).*", r"(?<=there are )acc[^)]*"]):
        REFUSED[case]()


def test_every_figure_has_a_direction():
    assert is_higher_better("auroc")
    assert not is_higher_better("rmse")
    assert not is_higher_better("worst", [Worst()])
