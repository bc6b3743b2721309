"""What an own model's ``losses`` may give: sums and weights; anything else ends in one line, on any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import problems
from helpers.problems import Problem, engine_run
from torch import nn

from trainer.cli import run
from trainer.contract import Model
from trainer.engine.loss_check import PLACE, LossCheck, numbers_of, select_samples
from trainer.engine.model_state import ModelState

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = """
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainer import Data, Loss, Memory, Model, Optim, Recipe, Run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.line(x).tanh()


@dataclass
class Own(Model):
    "A model whose losses are of some kind."
    kind: str = "sum"
    norm: bool = False
    blocks = (Block,)

    def build(self):
        norm = nn.BatchNorm1d(4) if self.norm else nn.Identity()
        return nn.Sequential(nn.Linear(2, 4), Block(), Block(), norm, nn.Dropout(0.3), nn.Linear(4, 3))

    def losses(self, module, batch):
        logits, count = module(batch["x"]), len(batch["labels"])
        each = cross_entropy(logits, batch["labels"], reduction="none")
        total = each.sum()
        if self.kind == "endless":
            return repeat(Loss(total, count))
        if self.kind in ("returned", "loss"):
            return total if self.kind == "returned" else Loss(total, count)
        found = {
            "mean": lambda: Loss(each.mean(), count),
            "one": lambda: Loss(each.mean(), 1.0),
            "scaled mean": lambda: Loss(each.mean() * count**0.5, count),
            "drawn": lambda: Loss((each * (1 + torch.rand_like(each))).sum(), count),
            "interacting": lambda: Loss(total + (logits @ logits.T).logsumexp(1).sum(), count),
            "tensor": lambda: total,
            "pair": lambda: (total, count),
            "number": lambda: Loss(float(total), count),
            "vector": lambda: Loss(each, count),
            "detached": lambda: Loss(total.detach(), count),
            "strange weight": lambda: Loss(total, [count]),
            "weights": lambda: Loss(total, torch.ones(count)),
        }
        return iter([found.get(self.kind, lambda: Loss(total, count))()])

    def weigh(self, batch):
        count = float(len(batch["labels"]))
        kinds = {"float weigh": count, "other names": {"losses": count}, "one": {"loss": 1.0}}
        return kinds.get(self.kind, {"loss": count})


@dataclass
class Interacting(Own):
    "A model that says so."
    kind: str = "interacting"
    samples_interact = True


@dataclass
class Two(Own):
    "Two losses, of which the second is a mean."
    loss_names = ("left", "right")

    def losses(self, module, batch):
        for name, how in zip(self.loss_names, ("sum", "mean")):
            yield Loss(cross_entropy(module(batch["x"]), batch["labels"], reduction=how), len(batch["x"]), name=name)

    def weigh(self, batch):
        return dict.fromkeys(self.loss_names, float(len(batch["labels"])))


@dataclass
class Unweighed(Own):
    "Neither labels nor weigh()."
    weigh = Model.weigh


@dataclass
class Points(Data):
    "Points in the plane."
    named: str = "labels"

    def prepare(self, tokenizer=None):
        points = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
        self.train = [{"x": point, self.named: i % 3} for i, point in enumerate(points)]
        self.num_classes = 3


recipe = Recipe(
    model=MODEL,
    data=Points(DATA),
    optim=Optim("sgd", lr=0.1),
    batch_size=12,
    epochs=1,
    memory=Memory(micro_batch_size=6, correct_batchnorm=True),
    run=Run(progress=False, predict=False, evaluate=False),
)
"""


def fitted(folder, model, words=(), data=""):
    """Exit code, standard output and standard error of ``trainer fit`` of one of these models, in this process."""
    path = Path(folder) / f"own_{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(RECIPE.replace("MODEL", model).replace("DATA", data))
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = run(["fit", str(path), f"--run.dir={folder}/run", "--run.accelerator=cpu", *words])
    return code, out.getvalue(), error.getvalue()


MEAN = (
    r"loss 'loss' of some samples is [\d.]+, but [\d.]+ \+ [\d.]+ for their two halves: losses\(\) must return the sum"
)
FAULTS = {
    "mean": MEAN,
    "scaled mean": MEAN,
    "interacting": "samples_interact = True",
    "one": r"weigh\(\) returns 1 for loss 'loss' of some samples, but 1 \+ 1 for their two halves",
    "endless": "yields 'loss' twice: yield each of loss_names once per micro-batch",
    "tensor": r"losses\(\) yields a Tensor: yield Loss\(total, weight\)",
    "pair": r"losses\(\) yields a tuple: yield Loss\(total, weight\)",
    "returned": r"losses\(\) returns a Tensor: yield Loss\(total, weight\)",
    "loss": r"losses\(\) returns a Loss: yield Loss\(total, weight\)",
    "number": "total of type float: give the sum as a scalar tensor",
    "vector": r"total of shape \(6,\): give the sum as a scalar tensor \(reduction='sum'\)",
    "detached": "has no gradient graph, so the model cannot learn from it",
    "strange weight": "weight of type list: return the number of items",
    "weights": r"weight of shape \(6,\): return the number of items",
    "float weigh": r"weigh\(\) returns 6.0: return a dict from every name in loss_names",
    "other names": "use the same names in all three",
}


def require_line(code, error, message, kind="Own"):
    lines = [line for line in error.splitlines() if "trainer: error: " in line]
    assert code == 2, error
    assert len(lines) == 1, error
    assert "Traceback" not in error
    assert f"trainer: error: {kind}" in lines[0]
    assert pytest.raises(ValueError, match=message).matches(ValueError(lines[0])), lines[0]


@pytest.mark.first(9)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((kind, "--memory.precision=32-true") for kind in FAULTS),
        ("mean", "--memory.precision=bf16-mixed"),
        ("tensor", "--memory.precision=bf16-mixed"),
        ("returned", "--memory.precision=bf16-true"),
        ("mean", "--memory.micro_batch_size=1"),  # even of one sample: it is taken twice
        ("mean", "--memory.micro_batch_size=3"),
    ],
)
def test_what_is_no_sum_with_its_weight_ends_in_one_line(kind, words, tmp_path):
    code, _, error = fitted(tmp_path, f"Own({kind!r})", [words])
    require_line(code, error, FAULTS[kind])


def test_each_of_several_losses_is_compared_and_a_batch_without_labels_needs_a_weigh(tmp_path):
    code, _, error = fitted(tmp_path, "Two()")
    require_line(code, error, "loss 'right' of some samples", "Two")
    code, _, error = fitted(tmp_path / "other", "Unweighed()", data="named='y'")
    require_line(code, error, r"has no weigh\(\), and its micro-batches have no tensor 'labels'", "Unweighed")


@pytest.mark.parametrize("model", ["Own()", "Own(norm=True)", "Own('drawn')", "Interacting()"])
def test_what_is_right_or_cannot_be_compared_trains(model, tmp_path):
    code, out, error = fitted(tmp_path, model, ["--run.progress=true"])
    assert code == 0, error
    assert ("warning: Interacting.samples_interact: the loss of a sample" in out + error) == (model == "Interacting()")


@pytest.mark.first(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_mean_ends_two_ranks_alike(strategy, ranks, tmp_path):
    words = [f"--memory.strategy={strategy}", "--memory.micro_batch_size=3"]
    for code, _, error in ranks(2).run(fitted, str(tmp_path), "Own('mean')", words):
        require_line(code, error, MEAN)


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        ("Own(norm=True)", "ddp", []),
        ("Own('drawn')", "fsdp", ["--memory.activation_checkpointing=full"]),
        ("Own()", "fsdp", ["--batch_size=3", "--memory.micro_batch_size=2"]),  # a rank with one sample, a rank with two
        ("Own()", "ddp", ["--batch_size=1", "--memory.micro_batch_size=1"]),  # a rank with none
        ("Own()", "fsdp", ["--batch_size=1", "--memory.micro_batch_size=1"]),
    ],
)
def test_what_is_right_trains_on_two_ranks(model, strategy, words, ranks, tmp_path):
    words = [f"--memory.strategy={strategy}", "--max_steps=2", *words]
    idle = "warning: batch_size=1 has fewer samples than ranks: 1 of 2 ranks are idle in every step; use fewer ranks"
    warned = f"{idle} or a larger batch\n" if "--batch_size=1" in words else ""
    expected = [warned, ""]  # by the first rank
    assert [(code, error) for code, _, error in ranks(2).run(fitted, str(tmp_path), model, words)] == [
        (0, warned) for warned in expected
    ]


@pytest.mark.parametrize("name", ["mlp", "distilbert", "two_losses"])
def test_the_comparison_changes_no_bit_of_what_follows(name, monkeypatch):
    """Dropout draws what it drew, and every part is in the mode that it was in."""
    problem, compared = Problem(name, 12, 6, 3, precision="32-true"), []
    original, make = LossCheck._compare, problems.make_model

    def with_dropout(name):
        model = make(name)
        return dataclasses.replace(model, dropout=0.3) if hasattr(model, "dropout") else model

    def spied(self, *args):
        compared.append(args[2] is not None)
        original(self, *args)

    monkeypatch.setattr(problems, "make_model", with_dropout)
    monkeypatch.setattr(LossCheck, "_compare", spied)
    found = engine_run(problem)
    monkeypatch.setattr(LossCheck, "check_additive", lambda *args: None)
    expected = engine_run(problem)
    assert compared
    assert all(compared)
    assert found["losses"] == expected["losses"]
    assert torch.equal(found["after"], expected["after"])


def test_modes_and_generators_are_as_they_were():
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    module[1].eval()
    generator = torch.Generator()

    def state():
        numbers = np.random.get_state()[1], torch.get_rng_state(), generator.get_state()
        return [part.training for part in module.modules()], random.getstate(), *(list(map(int, n)) for n in numbers)

    before, kept = state(), ModelState(module, Model(), generator)
    random.random(), np.random.rand(), torch.rand(()), torch.rand((), generator=generator)
    module.train()
    kept.restore()
    assert state() == before


def row(*numbers):
    return torch.tensor(numbers)


Fields = namedtuple("Fields", "x y")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (row(1, 2, 3), row(3, 1)),
        (
            {"x": row(1, 2, 3), "names": ["a", "b", "c"], "of": "train", "rate": torch.tensor(2)},
            {"x": row(3, 1), "names": ["c", "a"], "of": "train", "rate": torch.tensor(2)},
        ),
        ((row(1, 2, 3), row(4, 5, 6)), (row(3, 1), row(6, 4))),
        ([row(1, 2, 3), row(4, 5, 6), row(7, 8, 9)], [row(3, 1), row(6, 4), row(9, 7)]),  # three fields
        ([row(1), row(2, 2), row(3)], [row(3), row(1)]),  # three samples
        ([{"box": row(1)}, {"box": row(2, 2)}, {"box": row(3)}], [{"box": row(3)}, {"box": row(1)}]),
        (Fields(row(1, 2, 3), None), Fields(row(3, 1), None)),
    ],
)
def test_samples_are_taken_out_of_any_nest(batch, expected):
    assert repr(select_samples(batch, [2, 0], 3)) == repr(expected)


@pytest.mark.parametrize("batch", [row(1, 2), {"x": row(1, 2, 3), "edges": row(1, 2, 3, 4)}, [row(1, 2)], object()])
def test_a_batch_that_has_no_row_for_each_sample_is_not_cut(batch):
    assert chosen_of(batch, 3, lambda batch: 1.0) == []


class Counted(Model):
    """Weighs by ``count``."""

    def __init__(self, count):
        self.count = count

    def weigh(self, batch):
        return {"loss": float(self.count(batch))}


def chosen_of(batch, count, weigh, check=None):
    """What is compared of a micro-batch of ``count`` samples, as lists: some samples, their halves, and backwards."""
    chosen = (check or LossCheck(Counted(weigh)))._choose(batch, count)
    return [[piece.tolist() if isinstance(piece, torch.Tensor) else piece for piece in pieces] for pieces in chosen]


def test_samples_that_are_compared_have_a_weight():
    """A sample that is alone is taken twice."""

    def weigh(batch):
        return (batch != -100).sum()

    assert chosen_of(row(-100, 5, -100, 6, 7), 5, weigh) == [[[5, 6, 7], [5], [6, 7], [7, 6, 5]]]
    assert chosen_of(row(-100, 5), 2, weigh) == [[[5, 5], [5], [5], [5, 5]]]
    assert chosen_of(row(-100, -100), 2, weigh) == []


def test_samples_that_are_compared_have_the_smallest_and_the_largest_values_of_a_column():
    def ends(batch, count, weigh=lambda batch: 1.0, **of):
        return [(pieces[1], pieces[2]) for pieces in chosen_of(batch, count, weigh, **of)]

    assert ends(row(0, 0, 3, 0, 1, 2), 6) == [([0, 0], [2, 3])]
    lengths = [{"ids": [1], "mask": row(*[1] * n, *[0] * (5 - n))} for n in (3, 3, 3, 5, 2)]
    batch = {"mask": torch.stack([sample["mask"] for sample in lengths])}
    ((left, right),) = ends(batch, 5)
    assert left["mask"].sum(1).tolist() == [2, 3]
    assert right["mask"].sum(1).tolist() == [3, 5]
    ((left, right),) = ends(["abc", "a", "ab", "abcd", "abcde"], 5)
    assert (left, right) == (["a", "ab"], ["abcd", "abcde"])
    heavy = ends(torch.ones(5, 2), 5, lambda batch: 0.5 + torch.rand(len(batch)).sum())  # by the weights themselves
    assert len(heavy) == 1


def test_a_column_is_compared_once_and_as_soon_as_its_values_differ():
    check = LossCheck(Counted(len))
    alike, other = {"x": torch.ones(3, 2), "labels": row(0, 0, 0)}, {"x": torch.ones(3, 2), "labels": row(0, 1, 0)}
    assert len(chosen_of(alike, 3, len, check=check)) == 1  # any three samples: a mean of them is found
    assert check.columns - check.compared == {0}
    assert len(chosen_of(alike, 3, len, check=check)) == 0
    assert len(chosen_of(other, 3, len, check=check)) == 1
    assert check.columns == check.compared == {0, PLACE}
    assert len(chosen_of(other, 3, len, check=check)) == 0


def test_numbers_of_samples_are_values_and_counts():
    batch = {
        "labels": row(3, -100), "mask": row(1, 1, 0, 1, 0, 0).reshape(2, 3), "share": torch.tensor([[0.5], [0.25]]),
        "pixels": torch.rand(2, 3, 4),
        "image": torch.ones(2, 3, dtype=torch.uint8), "texts": ["ab", "c"],
        "names": ("x", "y", "z"), "rate": torch.tensor(0.1),
    }  # fmt: skip
    assert [*numbers_of(batch, 2)] == [[3, -100], [2, 1], [0.5, 0.25], [2, 1]]
