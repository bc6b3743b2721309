"""Keras 3's gradient accumulation on the torch backend, and ours, on windows that are not full."""

from __future__ import annotations

import os

import pytest
import torch
from helpers.benchmark import imported
from helpers.rounding import ROUNDING
from torch import nn

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras looks when it is imported
pytest.importorskip("keras", reason="needs Keras 3: pip install 'exactbatch-trainer[peers]'", exc_type=ImportError)

correctness, contenders = imported("correctness", "contenders")
EVEN, RAGGED, SHORT = correctness.CASES[:3]


def changed(case, epochs=1, of=None):
    """By how much Keras changes the weights of ``case``, all in one vector; of the samples ``of`` only."""
    module = case.module()
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    job = correctness.job(case, module)
    job.dataset = job.dataset if of is None else job.dataset[:of]
    contenders.keras_fit(job, epochs)
    return before - nn.utils.parameters_to_vector(module.parameters()).detach()


def mean_gradient(case, samples, module=None):
    module = module or case.module()
    batch = correctness.collate(samples)
    loss = nn.functional.cross_entropy(module(batch["input_ids"], batch["attention_mask"])["logits"], batch["labels"])
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_ragged_micro_batch_weighs_as_much_as_a_full_one_in_keras_and_what_it_holds_in_ours():
    samples, size = RAGGED.dataset(), RAGGED.micro_batch_size
    cut = [samples[at : at + size] for at in range(0, len(samples), size)]
    assert [len(part) for part in cut] == [4, 4, 4, 1]
    close(changed(RAGGED), torch.stack([mean_gradient(RAGGED, part) for part in cut]).mean(0))
    assert correctness.measure("Keras", RAGGED).relative_error > 0.5
    assert correctness.measure("ours", RAGGED).relative_error < ROUNDING


def test_both_are_exact_on_even_micro_batches():
    for contender in ("Keras", "ours"):
        assert correctness.measure(contender, EVEN).relative_error < ROUNDING, contender


def test_a_window_that_is_not_full_at_the_end_is_lost_in_keras_and_a_step_in_ours():
    assert changed(SHORT).count_nonzero() == 0
    assert correctness.measure("ours", SHORT).relative_error < ROUNDING


def test_what_is_left_of_an_epoch_goes_into_the_next_ones_first_step_in_keras():
    """Five micro-batches a step of four: gradients of older weights, beside new ones."""
    samples, size = RAGGED.dataset()[:10], 2
    case = correctness.Case("five of four", correctness.BagOfWords, 10, size, 4)
    module = case.module()
    cut = [samples[at : at + size] for at in range(0, len(samples), size)]

    def step(parts):
        gradient = torch.stack([gradient for part in parts for gradient in part]).sum(0) / 4
        vector = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(vector - gradient, module.parameters())

    start = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    step([[mean_gradient(case, part, module) for part in cut[:4]]])
    left = mean_gradient(case, cut[4], module)
    step([[left], [mean_gradient(case, part, module) for part in cut[:3]]])
    close(changed(case, epochs=2), start - nn.utils.parameters_to_vector(module.parameters()).detach())
