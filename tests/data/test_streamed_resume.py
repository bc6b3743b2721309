"""A run on streamed texts, killed twice an epoch: every sample once, and the losses of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("forks, and reads /proc", allow_module_level=True)

from helpers.streamed_kills import KILLED_BEFORE, SAMPLES, STEPS
from helpers.warm import python

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "helpers" / "streamed_kills.py"


def kill_and_resume(tmp_path, sample_data, ranks, workers):
    tokenizer = sample_data / "tokenizers" / "bert-base-uncased"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    done = python(PROGRAM, tmp_path, tokenizer, ranks, workers, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    calm, killed = found["calm"], found["killed"]
    assert "was saved by another recipe: data: " in found["refused"]
    assert "(changed: train/part-02.parquet)" in found["refused"]
    assert len(calm["losses"]) == len(killed["losses"]) == 2 * STEPS
    assert len(killed["begun"]) == len(KILLED_BEFORE) + 1
    # A checkpoint is written beside the training: the last one before the kill, or the one before that.
    assert all(0 < kill - 1 - begun <= 4 for kill, begun in zip(KILLED_BEFORE, killed["begun"][1:], strict=True))
    for run in (calm, killed):
        for epoch in range(2):
            steps = run["steps"][epoch * STEPS : (epoch + 1) * STEPS]
            assert Counter(index for step in steps for index in step) == Counter(range(SAMPLES))
    return calm, killed


def test_killed_twice_an_epoch_on_one_rank_and_two(tmp_path, sample_data):
    calm, killed = kill_and_resume(tmp_path, sample_data, "1,2,1,2,1", workers=0)
    assert list(map(sorted, killed["steps"])) == list(map(sorted, calm["steps"]))
    assert killed["losses"] == pytest.approx(calm["losses"], rel=1e-5)
    for name, sums in calm["weights"].items():
        assert killed["weights"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [("1,1,1,1,1", 2), ("2,2,2,2,2", 0)])
def test_on_the_same_ranks_bit_for_bit(tmp_path, sample_data, ranks, workers):
    calm, killed = kill_and_resume(tmp_path, sample_data, ranks, workers)
    assert killed["steps"] == calm["steps"]
    assert killed["losses"] == calm["losses"]
    assert killed["weights"] == calm["weights"]


@pytest.mark.slow
def test_on_changing_ranks_with_workers(tmp_path, sample_data):
    calm, killed = kill_and_resume(tmp_path, sample_data, "2,4,1,2,4", workers=2)
    assert list(map(sorted, killed["steps"])) == list(map(sorted, calm["steps"]))
    assert killed["losses"] == pytest.approx(calm["losses"], rel=1e-5)
