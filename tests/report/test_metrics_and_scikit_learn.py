"""Every metric that a recipe accepts equals scikit-learn's, also where classes are absent or targets are constant."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy import stats
from scipy.special import logsumexp
from sklearn import metrics as sklearn

from trainer import Checkpoint, Data, Loss, Memory, Model, Optim, Recipe, Run, fit
from trainer.recipe import METRICS_BY_TASK
from trainer.report.metrics import EvaluationMetrics
from trainer.report.mistakes import TopMistakes
from trainer.report.whole_set_metrics import WholeSetMetrics
from trainer.run.collectives import gather_rows, run_on_rank_zero
from trainer.run.evaluation import EvaluationAccumulators
from trainer.values import IGNORED_LABEL

LOSS = 0.5
SHAPES = ("all occur", "absent class", "one class", "never predicted")
LOGITS = ("plain", "ties", "sure", "masked")


@dataclass(frozen=True)
class Case:
    """A set of samples and what a model says of them."""

    task: str
    classes: int
    items: int
    seed: int
    shape: str = SHAPES[0]
    logits: str = LOGITS[0]
    mean: float = 0.0
    spread: float = 1.0
    ignored: bool = False

    def drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and targets."""
        generator = torch.Generator().manual_seed(self.seed)
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        size = self.items, self.classes
        if self.task == "regression":
            targets = self.mean + self.spread * normal(*size)
            return {"plain": targets + normal(*size) / 2, "sure": targets.clone()}.get(
                self.logits, torch.full_like(targets, self.mean)
            ), targets
        logits = normal(*size).float()
        logits = {"ties": (2 * logits).round() / 2, "sure": 60 * logits}.get(self.logits, logits)
        if self.logits == "masked":
            logits[:, 0] = -math.inf
        if self.shape == "never predicted":
            logits[:, -1] -= 1000
        if self.task == "multi_label":
            targets = (logits + 2 * normal(*size) > 0).float()
            if self.shape in ("absent class", "one class"):
                targets[:, 0] = 0
            if self.shape == "one class":
                targets[:, -1] = 1
        else:
            known = {"absent class": max(1, self.classes - 1), "one class": 1}.get(self.shape, self.classes)
            targets = torch.randint(known, (self.items,), generator=generator) + (self.shape == "one class")
        if self.ignored:
            targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED_LABEL
        return logits, targets

    def names(self) -> list[str]:
        """All that a recipe may ask for."""
        of_two = ("f1", "precision", "recall")
        return [name for name in METRICS_BY_TASK[self.task] if name not in of_two or self.classes == 2]


def evaluation(case: Case, num_classes: int | None, **ranks: Any) -> EvaluationAccumulators:
    """The parts of an evaluation as a session composes them."""
    task: Any = case.task
    metrics = EvaluationMetrics(num_classes, "cpu", task=task, wanted=case.names())
    others = [name for name in case.names() if name not in metrics.names]
    scores = WholeSetMetrics(others, task, num_classes, **ranks, bytes_per_token=1.0, split="val")
    return EvaluationAccumulators(metrics, TopMistakes(wanted=False), scores)


def found(case: Case, size: int, num_classes: int | None, share: slice = slice(None), **ranks: Any) -> dict[str, float]:
    """The metrics of the case in micro-batches of ``size``, of which this rank has a share."""
    of_all, (logits, targets) = evaluation(case, num_classes, **ranks), case.drawn()
    for rows, labels in list(zip(logits.split(size), targets.split(size), strict=True))[share]:
        weight = torch.tensor(float(len(rows)))
        of_all.update(Loss(LOSS * weight, weight, logits=rows, targets=labels))
    values = of_all.compute().metrics()
    return {name: values[name] for name in case.names() if name in values}


def on_ranks(cases: list[Case], size: int) -> list[dict[str, float]]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    fabric: Any = SimpleNamespace(world_size=world, global_rank=rank, device=torch.device("cpu"))
    parts = {"gather": partial(gather_rows, fabric), "decide": partial(run_on_rank_zero, fabric)}
    return [found(case, size, case.classes, slice(rank, None, world), **parts) for case in cases]


def columns_of(case: Case, logits: np.ndarray, targets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each class which samples are of it, and log(p / (1 - p)), by its definition; for each label its logits."""
    if case.task == "multi_label":
        kept = targets != IGNORED_LABEL
        return [(targets[kept[:, k], k] > 0, logits[kept[:, k], k]) for k in range(case.classes)]
    found = []
    for k in (1,) if case.classes == 2 else range(case.classes):
        rest = np.sort(np.delete(logits, k, 1), 1)
        shift = np.where(np.isinf(logits[:, [k]]), 0, logits[:, [k]])
        found.append((targets == k, np.nan_to_num(logits[:, k] - shift[:, 0] - logsumexp(rest - shift, 1))))
    return found


def expected(case: Case) -> dict[str, float]:
    """By scikit-learn and scipy."""
    logits, targets = (each.double().numpy() for each in case.drawn())
    if case.task == "regression":
        return expected_of_numbers(logits, targets)
    if case.task != "multi_label":
        logits, targets = logits[targets != IGNORED_LABEL], targets[targets != IGNORED_LABEL].astype(int)
    values: dict[str, float] = {"perplexity": math.exp(LOSS)}
    if case.task == "multi_label":
        kept, rows = targets != IGNORED_LABEL, (targets != IGNORED_LABEL).any(1)
        true, said = (targets > 0) & kept, (logits > 0) & kept  # an ignored label is neither there nor said
        values["subset_accuracy"] = sklearn.accuracy_score(true[rows], said[rows]) if rows.any() else math.nan
        whole: dict[str, Any] = {}
    else:
        true, said = targets, logits.argmax(1) if len(logits) else targets
        whole = {"accuracy": sklearn.accuracy_score, "balanced_accuracy": sklearn.balanced_accuracy_score}
        whole |= {"mcc": sklearn.matthews_corrcoef}
    # scikit-learn takes a single label for two classes: there, and not there
    labels = [1] if case.classes == 1 else None
    for name in ("f1", "precision", "recall"):
        compute = getattr(sklearn, f"{name}_score")
        for mean in ("macro", "micro", "weighted"):
            whole[f"{name}_{mean}"] = partial(compute, average=mean, zero_division=0, labels=labels)
        if case.classes == 2 and case.task != "multi_label":
            whole[name] = partial(compute, labels=[1], average="macro", zero_division=0)
    empty = not len(true) or (case.task == "multi_label" and not rows.any())
    values |= {name: math.nan if empty else float(compute(true, said)) for name, compute in whole.items()}
    columns = columns_of(case, logits, targets)
    of_pairs = [sklearn.roc_auc_score(one, by) for one, by in columns if one.any() and not one.all()]
    precisions = [sklearn.average_precision_score(one, by) for one, by in columns if one.any()]
    values["auroc"] = float(np.mean(of_pairs)) if of_pairs else math.nan
    values["average_precision"] = float(np.mean(precisions)) if precisions else math.nan
    if len(true) and case.task != "multi_label":
        of_five = partial(sklearn.top_k_accuracy_score, k=5, labels=range(case.classes))
        values["top5_accuracy"] = of_five(true, np.nan_to_num(logits)) if case.classes > 5 else 1.0
    return {name: values.get(name, math.nan) for name in case.names()}


def expected_of_numbers(said: np.ndarray, true: np.ndarray) -> dict[str, float]:
    several = len(true) > 1
    constant = [bool((column == column[0]).all()) for column in true.T]
    pairs = list(zip(said.T, true.T, strict=True))
    # scikit-learn's R² of constants has a rounding error as its divisor: -1e31 for three times 0.1
    r2 = [
        float((p == t).all()) if same else sklearn.r2_score(t, p) for (p, t), same in zip(pairs, constant, strict=True)
    ]
    mse = sklearn.mean_squared_error(true, said)
    found = {"mae": sklearn.mean_absolute_error(true, said), "mse": mse, "rmse": math.sqrt(mse)}
    found["r2"] = float(np.mean(r2)) if several else math.nan
    for name, compute in {"pearson": stats.pearsonr, "spearman": stats.spearmanr}.items():
        found[name] = float(np.mean([compute(p, t)[0] for p, t in pairs])) if several else math.nan
    return found


def same(values: dict[str, float]) -> dict[str, Any]:
    return {name: pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True) for name, value in values.items()}


CLASSIFIED = st.builds(
    Case,
    task=st.sampled_from(["single_label", "token", "multi_label"]),
    classes=st.sampled_from([1, 2, 3, 7]),
    items=st.integers(1, 40),
    seed=st.integers(0, 1000),
    shape=st.sampled_from(SHAPES),
    logits=st.sampled_from(LOGITS),
    ignored=st.booleans(),
).filter(lambda case: case.classes > 1 or (case.task == "multi_label" and case.logits != "masked"))
NUMBERS = st.builds(
    Case,
    task=st.just("regression"),
    classes=st.integers(1, 2),
    items=st.integers(1, 40),
    seed=st.integers(0, 1000),
    logits=st.sampled_from(["plain", "sure", "constant"]),
    mean=st.sampled_from([0.0, 0.1, 123.456, 1e6, 1.7e9]),
    spread=st.sampled_from([0.0, 1.0]),
)
HARD = [
    Case("single_label", 4, 60, 1, "absent class"),
    Case("single_label", 4, 60, 2, "one class"),
    Case("single_label", 2, 60, 3, "one class"),
    Case("single_label", 2, 60, 4, "never predicted"),
    Case("single_label", 2, 60, 5, logits="sure"),
    Case("token", 7, 60, 6, "absent class", "sure", ignored=True),
    Case("multi_label", 4, 60, 7, "one class", ignored=True),
    Case("multi_label", 1, 60, 8),
    Case("regression", 1, 60, 9, mean=1e6),
    Case("regression", 2, 60, 10, mean=1.7e9),
    Case("regression", 1, 60, 11, mean=0.1, spread=0),
    Case("regression", 1, 60, 12, logits="constant"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60)
@given(CLASSIFIED | NUMBERS, st.integers(1, 17))
def test_every_metric_of_a_recipe_equals_scikit_learns(case, size):
    wanted = expected(case)
    assert wanted.keys() == set(case.names())
    assert found(case, size, case.classes) == same(wanted)
    assert found(case, size, None) == same(wanted)  # from the predictions alone, as for a model without num_classes


def test_one_and_three_ranks_find_the_same(ranks):
    alone = [found(case, 7, case.classes) for case in HARD]
    for each in ranks(3).run(on_ranks, HARD, 7):
        assert each == [same(one) for one in alone]
    few = [Case("regression", 1, 2, 0, mean=0.1), Case("multi_label", 2, 2, 0)]  # the third rank has no samples
    for each in ranks(3).run(on_ranks, few, 1):
        assert each == [same(found(case, 1, case.classes)) for case in few]


@pytest.mark.first(4)
@pytest.mark.parametrize("value", [0.1, 0.2, 0.3, 0.7, 1 / 3, 5.5, 123.456, 1e-3, 1.7e9 + 0.1])
def test_r2_of_equal_targets_is_exactly_0_or_1(value):
    for items in range(2, 60):
        targets = torch.full((items, 1), value)
        for off, wanted in ((0.05 * value, 0.0), (0.0, 1.0)):
            metrics = EvaluationMetrics(1, "cpu", task="regression")
            for rows in targets.split(5):
                metrics.update(Loss(torch.zeros(()), 1, logits=rows + off, targets=rows))
            assert metrics.compute().custom_metrics["r2"] == wanted


def test_a_prediction_that_is_no_number_makes_metrics_nan_and_ends_no_run():
    for case in (HARD[0], Case("multi_label", 3, 20, 0), Case("regression", 1, 20, 0), HARD[10]):
        of_all, (logits, targets) = evaluation(case, case.classes), case.drawn()
        of_all.update(Loss(torch.zeros(()), 1, logits=torch.full_like(logits, math.nan), targets=targets))
        values = of_all.compute().metrics()
        names = {"regression": case.names()}.get(case.task, ["auroc", "average_precision"])
        assert all(math.isnan(values[name]) for name in names)


def test_a_set_without_labels_has_metrics_that_are_nan():
    of_all = evaluation(HARD[0], 4)
    targets = torch.full((3,), IGNORED_LABEL)
    of_all.update(Loss(torch.zeros(()), 0.0, logits=torch.randn(3, 4), targets=targets))
    values = of_all.compute().metrics()
    assert all(math.isnan(values[name]) for name in ("mcc", "f1_macro", "auroc"))


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (HARD[0], "auroc is the mean of 3 of 4; average_precision is the mean of 3 of 4"),
        (HARD[1], "auroc is NaN, because no class has a value; average_precision is the mean of 1 of 4"),
        (HARD[2], "auroc is NaN, because no class has a value"),
        (HARD[6], "auroc is the mean of 2 of 4; average_precision is the mean of 3 of 4"),
        (HARD[5], None),
        (HARD[7], None),
    ],
)
def test_one_line_says_which_classes_were_left_out(case, line, capsys):
    of_all, (logits, targets) = evaluation(case, case.classes), case.drawn()
    if line is None:
        targets[: case.classes] = torch.arange(case.classes) if targets.ndim == 1 else torch.tensor([[1.0]])
    for _ in range(3):  # evaluations
        of_all.reset()
        of_all.update(Loss(torch.zeros(()), 1, logits=logits, targets=targets))
        of_all.compute()
    text = f"trainer: warning: val lacks positive or negative samples of some classes: {line}\n"
    assert capsys.readouterr().err == (text if line else "")


@dataclass
class Linear(Model):
    """A linear classifier of four classes."""

    num_classes: int | None = 4

    def build(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 4)

    def losses(self, module: Any, batch: Any) -> Any:
        logits, labels = module(batch["x"]), batch["labels"]
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        yield Loss(total, len(labels), logits=logits.detach(), targets=labels)


@dataclass
class WithoutOne(Data):
    """Random samples; class 2 is not in the validation set."""

    num_classes = 4

    def prepare(self, tokenizer: Any = None) -> None:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(97, 6, generator=generator), torch.randint(4, (97,), generator=generator)
        rows = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
        self.train, self.val = rows[:37], [row for row in rows[37:] if int(row["labels"]) != 2]


@pytest.mark.usefixtures("no_pictures")
def test_a_run_whose_validation_set_lacks_a_class(tmp_path, capsys):
    names = ["auroc", "average_precision", "balanced_accuracy"]
    run = Run(dir=str(tmp_path / "run"), accelerator="cpu", progress=False, predict=False, metrics=names, best="last")
    kept = {"memory": Memory(micro_batch_size=3), "checkpoint": Checkpoint(every=None), "run": run}
    fit(Recipe(model=Linear(), data=WithoutOne(), optim=Optim("sgd", lr=0.3), batch_size=8, epochs=2, **kept))
    with open(tmp_path / "run/metrics.csv", newline="") as file:
        last = [row for row in csv.DictReader(file) if row["val_loss"]][-1]
    module, data = Linear().build(), WithoutOne()
    module.load_state_dict(load_file(tmp_path / "run/model/model.safetensors"))
    data.prepare()
    y = np.array([int(row["labels"]) for row in data.val])
    with torch.no_grad():
        p = module(torch.stack([row["x"] for row in data.val])).double().softmax(-1).numpy()
    wanted = {
        "auroc": np.mean([sklearn.roc_auc_score(y == k, p[:, k]) for k in (0, 1, 3)]),
        "average_precision": np.mean([sklearn.average_precision_score(y == k, p[:, k]) for k in (0, 1, 3)]),
        "balanced_accuracy": np.mean([(p.argmax(1) == k)[y == k].mean() for k in (0, 1, 3)]),
    }
    assert {name: float(last[f"val_{name}"]) for name in names} == same(wanted)
    told = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    shares = "auroc is the mean of 3 of 4; average_precision is the mean of 3 of 4"
    assert told == [f"trainer: warning: val lacks positive or negative samples of some classes: {shares}"]
