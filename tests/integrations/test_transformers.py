"""The drop-in for transformers' Trainer, compared with plain torch on whole batches in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integrations import drop_in_cases as cases
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.integrations.transformers import ExactGradients, ExactTrainer

EXACT = 1e-12


@pytest.mark.parametrize("name", cases.CASES)
def test_two_epochs_whose_last_window_is_ragged_are_those_of_whole_batches(name):
    case = cases.CASES[name]
    samples = cases.samples_of(case, 13)  # windows of 8 samples, and of 2 + 2 + 1
    assert cases.difference(cases.trained(case, samples), cases.whole_batches(case, samples, 8)) < EXACT


def test_clipping_is_that_of_the_whole_batch():
    case = cases.CASES["classes"]
    samples = cases.samples_of(case, 13)
    found = cases.trained(case, samples, max_grad_norm=0.1)
    expected = cases.whole_batches(case, samples, 8, clip_norm=0.1)
    assert cases.difference(found, expected) < EXACT
    assert cases.difference(expected, cases.whole_batches(case, samples, 8)) > 1e-6


class Endless(torch.utils.data.IterableDataset):
    """Samples without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def test_a_window_that_the_end_of_data_without_a_length_cuts_is_a_step():
    case = cases.CASES["next tokens"]
    samples = cases.samples_of(case, 13)
    found = cases.trained(case, Endless(samples), max_steps=4)
    assert cases.difference(found, cases.whole_batches(case, samples, 8)) < EXACT


def test_the_logged_loss_is_the_mean_of_the_whole_batch(tmp_path):
    case = cases.CASES["tokens"]
    samples = cases.samples_of(case, 5)
    batch = torch.utils.data.default_collate(samples)
    model = cases.model_of(case)
    expected = cases.mean_loss(case, model(input_ids=batch["input_ids"]).logits, batch["labels"]).detach()
    trainer = cases.drop_in(model, samples, str(tmp_path), num_train_epochs=1)
    assert trainer.train().training_loss == pytest.approx(float(expected), abs=1e-6)
    assert trainer.evaluate(samples[:2])["eval_loss"] > 0


class Focal(ExactTrainer):
    """A custom loss: cross entropy times the square of the probability of an error."""

    def loss_sum(self, outputs, labels):
        loss = cross_entropy(outputs["logits"], labels, reduction="none")
        return ((1 - (-loss).exp()) ** 2 * loss).sum()


def test_a_custom_loss_is_a_sum_and_a_weight():
    case = cases.CASES["classes"]
    samples = cases.samples_of(case, 7)
    batch = torch.utils.data.default_collate(samples)
    model = cases.model_of(case)
    loss = cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none")
    focal = ((1 - (-loss).exp()) ** 2 * loss).mean()
    gradients = torch.autograd.grad(focal, list(model.parameters()))
    expected = -cases.RATE * nn.utils.parameters_to_vector(gradients)
    found = cases.trained(case, samples, kind=Focal, num_train_epochs=1)
    assert cases.difference(found, expected) < EXACT


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(cases.WORDS, cases.CLASSES), nn.BatchNorm1d(cases.CLASSES)

    def forward(self, input_ids, labels=None):
        logits = self.norm(self.embed(input_ids).mean(1))
        return {"logits": logits} | ({} if labels is None else {"loss": cross_entropy(logits, labels)})


class Needy(Norm):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels)


class Auxiliary(Needy):
    def forward(self, input_ids, labels=None):
        outputs = super().forward(input_ids, labels)
        return outputs | ({"loss": outputs["loss"] + 0.01} if labels is not None else {})


class Own(ExactTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


REJECTED = {
    "compute_loss_func": {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs["logits"].mean()},
    "compute_loss": {"kind": Own},
    "LOMO": {"optim": "lomo"},
    "batch normalization": {"model": Norm()},
    "forward needs labels": {"model": Needy()},
    "class_weights=": {"model": Auxiliary()},
    "labels": {"data_collator": lambda samples: {"input_ids": torch.stack([s["input_ids"] for s in samples])}},
}


@pytest.mark.parametrize("word", REJECTED)
def test_what_cannot_be_exact_is_rejected_with_one_line(word, tmp_path):
    given = dict(REJECTED[word])
    case = cases.CASES["classes"]
    model = given.pop("model", None) or cases.model_of(case)
    with pytest.raises(ValueError, match=word) as error:
        cases.drop_in(model, cases.samples_of(case, 4), str(tmp_path), remove_unused_columns=False, **given).train()
    assert "\n" not in str(error.value)


def test_a_router_loss_is_rejected(tmp_path):
    case = cases.CASES["classes"]
    model = cases.model_of(case)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits"):
        cases.drop_in(model, cases.samples_of(case, 4), str(tmp_path))


def test_smoothing_of_numbers_is_rejected(tmp_path):
    case = cases.CASES["regression"]
    trainer = cases.drop_in(cases.model_of(case), cases.samples_of(case, 4), str(tmp_path), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        trainer.train()


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, trainer; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert issubclass(ExactTrainer, ExactGradients)


@pytest.mark.slow
def test_two_ranks_with_different_numbers_of_micro_batches_and_windows_are_exact():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    file = str(Path(cases.__file__))
    done = subprocess.run([*command, file], env=environment, capture_output=True, text=True, timeout=300, check=False)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 3]
    assert len(rows) == 4 * len(cases.CASES), done.stderr[-3000:]
    assert {name: error for _, name, error, _ in rows if not float(error) < EXACT} == {}
