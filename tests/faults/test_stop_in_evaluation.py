"""A signal during an evaluation: it is left at once, everything is saved, and the resumed run makes it again."""

from __future__ import annotations

import csv
import math
import os
import signal
from typing import Any

import pytest
from helpers.resumed import TESTED, FewDigits, losses, recipe, saved

from trainer.api import fit
from trainer.engine.loss_check import COMPARED
from trainer.errors import RunStoppedError
from trainer.models import MLP

pytestmark = pytest.mark.usefixtures("no_pictures")

EVALUATED_AT_ONCE = 8  # twice the micro-batch of training


class ValidatedDigits(FewDigits):
    """With a validation set, which is the test set."""

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.val = self.test


class Interrupting(MLP):
    """This process gets a SIGTERM at the second forward of the n-th evaluation of a run."""

    evaluation: int | None = None
    forwards = 0

    def losses(self, module: Any, batch: Any) -> Any:
        if not module.training and len(batch["labels"]) > COMPARED:  # not what the first step compares beside it
            each = math.ceil(TESTED / EVALUATED_AT_ONCE)
            type(self).forwards += 1
            if self.evaluation is not None and self.forwards == (self.evaluation - 1) * each + 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().losses(module, batch)


def train(run_dir, monkeypatch, evaluation, **run):
    monkeypatch.setattr(Interrupting, "evaluation", evaluation)
    monkeypatch.setattr(Interrupting, "forwards", 0)
    settings = {"model": Interrupting([16], dropout=0.2), "data": ValidatedDigits(test_fraction=0.97), "eval_every": 2}
    return fit(recipe(run_dir, run={"evaluate": True} | run, **settings))


def history(run_dir):
    """All figures but those of time."""
    with open(run_dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if "second" not in key and key != "data_share"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_dir, train(run_dir, monkeypatch, None)


# Evaluated on val after steps 2, 3 (the end of the epoch), 4 and 6, then on test.
@pytest.mark.parametrize(("evaluation", "step", "left"), [(2, 3, 4), (5, 6, 1)])
def test_the_evaluation_is_left_and_made_again(evaluation, step, left, whole, tmp_path, monkeypatch):
    with pytest.raises(RunStoppedError, match=rf"stopped by SIGTERM after step {step}; everything is saved"):
        train(tmp_path, monkeypatch, evaluation)
    each = math.ceil(TESTED / EVALUATED_AT_ONCE)
    assert Interrupting.forwards == (evaluation - 1) * each + 2  # none after the one in the making
    assert (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
    assert not (tmp_path / "model").exists()

    summary = train(tmp_path, monkeypatch, None, resume="auto")
    run_dir, undisturbed = whole
    assert Interrupting.forwards == left * each  # the one that was left, and those after it
    assert history(tmp_path) == history(run_dir)
    assert losses(tmp_path) == losses(run_dir)
    resumed, expected = saved(tmp_path, 6), saved(run_dir, 6)
    for one in (resumed, expected):
        del one["state"]["counters"]  # the end of an epoch is also the start of the next one
    assert resumed == expected
    assert summary.metrics == undisturbed.metrics
