"""Keras 3's gradient accumulation on the torch backend, on windows that are not full."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras looks when it is imported
pytest.importorskip("keras", reason="needs Keras 3: pip install 'exactbatch-trainer[peers]'", exc_type=ImportError)

from conformance.cases import CASES, Case
from conformance.job import Job
from conformance.record import Recorder
from conformance.trainers import keras
from conformance.verdict import Reference, Run, judge


def trained(case, folder):
    """The steps that Keras takes."""
    job = Job(case, folder)
    with Recorder(job.module) as job.recorder:
        keras.train(job)
    return job.recorder.steps


def verdict(case, folder):
    steps = trained(case, folder)
    run = Run(steps, [step.passes for step in steps], steps[-1].weights)
    return judge(case, Reference(case, case.build()), run)


def samples(steps):
    """The numbers of the samples of each pass."""
    return [[one.samples for one in step.passes] for step in steps]


def test_a_ragged_micro_batch_weighs_as_much_as_a_full_one(tmp_path):
    found = verdict(CASES["ragged"], tmp_path)
    assert found.kind == "ragged"
    assert "1 to 12: 0.81, 13: 3.2" in found.detail  # a quarter of the gradient, shared by 4 and by 1 of 13 samples


def test_even_micro_batches_are_exact(tmp_path):
    assert verdict(CASES["even"], tmp_path).kind == "exact"


def test_a_window_that_is_not_full_at_the_end_is_lost(tmp_path):
    steps = trained(Case("lost", "5 micro-batches", "bag", samples=10), tmp_path)
    assert samples(steps) == [[[1, 2], [3, 4], [5, 6], [7, 8]]]


def test_what_is_left_of_an_epoch_goes_into_the_next_ones_first_step(tmp_path):
    steps = trained(Case("late", "5 micro-batches, 2 epochs", "bag", samples=10, epochs=2), tmp_path)
    assert samples(steps) == [
        [[1, 2], [3, 4], [5, 6], [7, 8]],
        [[9, 10], [1, 2], [3, 4], [5, 6]],
    ]
